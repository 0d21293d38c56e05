/* ranks.h - starts the ranks of an example as processes, without MPI: the program runs itself once a rank.
 *
 *   int main(int argc, char **argv) { return run_ranks(argc, argv, 4, one_rank); }
 *
 * one_rank gets its rank, the number of ranks and a folder where they meet; 0 is success. `--ranks N` chooses another
 * number. */
#ifndef DEEPEP_EXAMPLE_RANKS_H
#define DEEPEP_EXAMPLE_RANKS_H
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

typedef int (*one_rank_fn)(int rank, int size, const char *directory);

static int run_ranks(int argc, char **argv, int size, one_rank_fn one_rank) {
  char directory[] = "/tmp/deepep-example-XXXXXX", ranks[16], number[16];
  pid_t children[64];
  int rank, failed = 0;
  if (argc == 5 && strcmp(argv[1], "--rank") == 0) return one_rank(atoi(argv[2]), atoi(argv[3]), argv[4]);
  if (argc == 3 && strcmp(argv[1], "--ranks") == 0) size = atoi(argv[2]);
  if (size < 1 || size > 64) {
    fprintf(stderr, "--ranks: got %d, allowed 1 to 64\n", size);
    return 2;
  }
  if (mkdtemp(directory) == NULL) {
    perror("mkdtemp");
    return 1;
  }
  snprintf(ranks, sizeof ranks, "%d", size);
  for (rank = 0; rank < size; rank++) {
    char *arguments[6];
    snprintf(number, sizeof number, "%d", rank);
    arguments[0] = argv[0];
    arguments[1] = (char *)"--rank";
    arguments[2] = number;
    arguments[3] = ranks;
    arguments[4] = directory;
    arguments[5] = NULL;
    if (posix_spawn(&children[rank], "/proc/self/exe", NULL, NULL, arguments, environ) != 0) {
      perror("posix_spawn");
      children[rank] = -1;
      failed = 1;
    }
  }
  for (rank = 0; rank < size; rank++) {
    int status = 0;
    if (children[rank] < 0) continue;
    waitpid(children[rank], &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      fprintf(stderr, "rank %d failed (status %d)\n", rank, status);
      failed = 1;
    }
  }
  rmdir(directory);
  return failed;
}

/* BF16 of a float (round to nearest even), and back. */
static inline unsigned short to_bf16(float value) {
  unsigned int bits;
  memcpy(&bits, &value, sizeof bits);
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static inline float from_bf16(unsigned short value) {
  unsigned int bits = (unsigned int)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

#endif
