/* Preloaded into the processes of a run, it adds an offset to their wall clock: the jump of a clock that other programs
   on the machine must not see. The offset is an integer of seconds, 8 bytes, in the file named by SHIFTED_CLOCK.

   Waits until a time of the wall clock end when the shifted clock has it, as they would on a machine whose clock was
   set. Times of the monotonic clock, which counts from the machine's start, are left as they are: they are small. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SMALLEST_WALL_TIME 1000000000

static volatile int64_t none;
static volatile int64_t *offset = &none;

__attribute__((constructor)) static void map_offset(void) {
  const char *path = getenv("SHIFTED_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (found != MAP_FAILED) offset = found;
}

#define REAL(name, version) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))(version[0] ? dlvsym(RTLD_NEXT, #name, version) : dlsym(RTLD_NEXT, #name));

int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime, "")
  int failed = real(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  (void)zone;
  return 0;
}

time_t time(time_t *kept) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (kept) *kept = now.tv_sec;
  return now.tv_sec;
}

static struct timespec kernel_time(const struct timespec *until) {
  struct timespec shifted = *until;
  if (shifted.tv_sec > SMALLEST_WALL_TIME) shifted.tv_sec -= *offset;
  return shifted;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  REAL(pthread_cond_timedwait, "GLIBC_2.3.2")
  struct timespec shifted = kernel_time(until);
  return real(condition, mutex, &shifted);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
  REAL(pthread_mutex_timedlock, "")
  struct timespec shifted = kernel_time(until);
  return real(mutex, &shifted);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  REAL(sem_timedwait, "")
  struct timespec shifted = kernel_time(until);
  return real(semaphore, &shifted);
}
