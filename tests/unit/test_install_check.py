import pytest

from s4kv_ext import doctor, install_check


@pytest.fixture
def machine(monkeypatch, tmp_path):
    def make(variant: str, gpu: bool) -> None:
        device = tmp_path / "nvidiactl"
        if gpu:
            device.touch()
        monkeypatch.setattr(install_check, "GPUS", (str(device),))
        monkeypatch.setattr(install_check, "build_info", lambda: {"variant": variant})
        monkeypatch.setattr(install_check, "state", tuple)
        monkeypatch.setenv(install_check.MISPLACED_TOLD, "")

    return make


@pytest.mark.parametrize("variant, gpu, says", [("cpu", True, "CPU"), ("cuda", False, "CUDA")])
def test_the_other_variant_is_meant(machine, variant, gpu, says, recwarn):
    machine(variant, gpu)
    install_check.plugin()
    install_check.plugin()  # once is enough, also for child processes
    told = [str(w.message) for w in recwarn]
    assert len(told) == 1 and says in told[0] and "install the" in told[0]


@pytest.mark.parametrize("variant, gpu", [("cpu", False), ("cuda", True)])
def test_the_right_variant_says_nothing(machine, variant, gpu, recwarn):
    machine(variant, gpu)
    install_check.plugin()
    assert install_check.misplaced() is None and not recwarn


def test_doctor_notes_it(machine, monkeypatch, capsys):
    machine("cpu", True)
    monkeypatch.setattr(install_check, "changed_members", list)
    monkeypatch.setattr(doctor, "library_problems", lambda variant: [])
    assert doctor.collect()["intact"]
    print(doctor.text(doctor.collect()))
    assert "NOTE          this is the CPU wheel" in capsys.readouterr().out
