/* Makes one system call of a process fail, or the process die in it: loaded before the C library, armed by ctypes.

   Counted are calls that change files: write (beyond standard error), fsync, rename, unlink, ftruncate, mkdir, and open
   for writing. In the one that the count ends at, either the error is returned, or the process is killed, in a write
   after half of it is done. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static long counted = 0;
static long target = -1;
static int what = 0; /* an error's number, or 0 to be killed */

void arm(long at, int error) { counted = 0; target = at; what = error; }
long calls(void) { return counted; }

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

static int due(void) { return target >= 0 && ++counted == target; }

static int fails(void) {
    if (!due()) return 0;
    if (!what) kill(getpid(), SIGKILL);
    errno = what;
    return 1;
}

ssize_t write(int file, const void *content, size_t size) {
    if (file > 2 && due()) {
        if (what) { errno = what; return -1; }
        REAL(write)(file, content, size / 2);
        kill(getpid(), SIGKILL);
    }
    return REAL(write)(file, content, size);
}

int fsync(int file) { return fails() ? -1 : REAL(fsync)(file); }
int ftruncate(int file, off_t size) { return fails() ? -1 : REAL(ftruncate)(file, size); }
int ftruncate64(int file, off64_t size) { return fails() ? -1 : REAL(ftruncate64)(file, size); }
int rename(const char *from, const char *to) { return fails() ? -1 : REAL(rename)(from, to); }
int unlink(const char *path) { return fails() ? -1 : REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { return fails() ? -1 : REAL(mkdir)(path, mode); }

#define OPEN(name)                                                  \
    int name(const char *path, int flags, ...) {                    \
        va_list more;                                               \
        va_start(more, flags);                                      \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                               \
        if (flags & (O_WRONLY | O_RDWR) && fails()) return -1;      \
        return REAL(name)(path, flags, mode);                       \
    }
OPEN(open)
OPEN(open64)
