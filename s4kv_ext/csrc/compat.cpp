// libstdc++ asks a variable of glibc 2.32 whether the process has a single thread, to save an atomic
// operation. "No" is always right, and with an answer of its own the library runs on an older glibc.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
