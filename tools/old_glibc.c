/* old_glibc.c - what gcc's libstdc++ asks for and glibc 2.28 lacks; linked in by `make GLIBC=2.28`.
 * False is always right: reference counts are then atomic. */
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
