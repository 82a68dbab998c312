// So that the libraries run on the C library that upstream's wheels promise, wherever they are built.
#include <pthread.h>

extern "C" {
// libstdc++ asks a variable of glibc 2.32 whether the process has a single thread, to save an atomic
// operation. "No" is always right.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// glibc 2.34 moved the threads' functions into libc and gave them its own version; the old one is
// still there.
int old_pthread_once(pthread_once_t*, void (*)());
__asm__(".symver old_pthread_once, pthread_once@GLIBC_2.2.5");
__attribute__((visibility("hidden"))) int pthread_once(pthread_once_t* control, void (*routine)()) {
  return old_pthread_once(control, routine);
}
}
