/* A launch: its threadgroups in an order drawn from the seed, and every way in which it can end early. */
#define _GNU_SOURCE
#include "runtime.h"

#include <link.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

mc_launch *mc_now;
uint32_t mc_groups[3];
uint64_t mc_accessed_at;

static sigjmp_buf failed;
static uint32_t *order; /* threadgroups in the order in which they run */
static uint64_t arguments[3 * MC_MAX_REGIONS];

void mc_describe_group(uint32_t serial, char *out, size_t size) {
  uint32_t at[3];
  mc_split(order[serial - 1], mc_groups, at);
  snprintf(out, size, "(%u, %u, %u)", at[0], at[1], at[2]);
}

static void set_error(int error, const char *where, int64_t index, const char *format, va_list values) {
  mc_now->error = (uint32_t)error;
  mc_now->index = index;
  snprintf(mc_now->where, sizeof mc_now->where, "%s", where ? where : "");
  vsnprintf(mc_now->message, sizeof mc_now->message, format, values);
  mc_where(mc_now->thread, mc_now->threadgroup);
  /* Messages that speak of a line have it from the call; the others are about the last access. */
  mc_now->address = 0;
  if (mc_now->checked && !strstr(format, "(line") && error != MC_DIVERGENCE) mc_now->address = mc_accessed_at;
}

void mc_fail(int error, const char *where, int64_t index, const char *format, ...) {
  /* What was noted before is the cause of what comes after it, unless that is the race behind both. */
  if (!mc_now->error || error == MC_DATA_RACE) {
    va_list values;
    va_start(values, format);
    set_error(error, where, index, format, values);
    va_end(values);
  }
  siglongjmp(failed, 1);
}

void mc_note(int error, const char *where, int64_t index, const char *format, ...) {
  if (mc_now->error) return;
  va_list values;
  va_start(values, format);
  set_error(error, where, index, format, values);
  va_end(values);
}

static void on_signal(int number, siginfo_t *info, void *context) {
  (void)context;
  const uint64_t address = (uint64_t)(uintptr_t)info->si_addr;
  if (number == SIGRTMIN + 3) mc_fail(MC_RUNAWAY, NULL, -1, "not done after %u seconds", mc_now->seconds);
  if (number == SIGFPE) mc_fail(MC_ARITHMETIC, NULL, -1, "integer division by zero (or overflow)");
  if (mc_is_thread_memory(address)) mc_fail_thread_memory();
  int64_t index;
  const char *name = mc_nearest_buffer(address, &index);
  mc_fail(MC_OUT_OF_BOUNDS, name, index, "memory fault at %#llx", (unsigned long long)address);
}

/* The object that holds the kernel: its constant tables may be read. */
static int find_code(struct dl_phdr_info *object, size_t size, void *unused) {
  (void)size;
  (void)unused;
  const uint64_t entry = (uint64_t)(uintptr_t)mc_now->entry;
  uint64_t begin = UINT64_MAX, end = 0;
  for (int i = 0; i < object->dlpi_phnum; i++) {
    const ElfW(Phdr) *p = &object->dlpi_phdr[i];
    if (p->p_type != PT_LOAD) continue;
    const uint64_t at = object->dlpi_addr + p->p_vaddr;
    if (at < begin) begin = at;
    if (at + p->p_memsz > end) end = at + p->p_memsz;
  }
  if (entry < begin || entry >= end) return 0;
  mc_now->code_begin = begin;
  mc_now->code_end = end;
  return 1;
}

static unsigned char signal_stack[64 << 10];
#define SIGNALS 4

/* The time limit must interrupt this very thread, even in a loop without loads. */
static int start_timer(timer_t *timer, uint32_t seconds) {
  struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + 3};
  const struct itimerspec limit = {.it_value.tv_sec = seconds};
  event._sigev_un._tid = gettid();
  return timer_create(CLOCK_MONOTONIC, &event, timer) || timer_settime(*timer, 0, &limit, NULL);
}

int mc_run(mc_launch *launch) {
  const int signals[SIGNALS] = {SIGSEGV, SIGBUS, SIGFPE, SIGRTMIN + 3};
  struct sigaction old_actions[SIGNALS];
  timer_t timer;
  stack_t old_stack, own_stack = {.ss_sp = signal_stack, .ss_size = sizeof signal_stack};
  struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  mc_now = launch;
  mc_self = NULL;
  mc_accessed_at = 0;
  dl_iterate_phdr(find_code, NULL);
  mc_random_state = launch->seed * 0x2545F4914F6CDD1Dull + 1;
  for (int i = 0; i < 3; i++) mc_groups[i] = (launch->grid[i] + launch->group[i] - 1) / launch->group[i];
  const uint64_t count = (uint64_t)mc_groups[0] * mc_groups[1] * mc_groups[2];
  order = malloc(count * sizeof *order);
  if (!order || mc_prepare_stacks() || mc_memory_begin()) {
    free(order);
    return -1;
  }
  for (uint32_t i = 0; i < launch->buffer_count; i++) arguments[i] = launch->buffers[i].address;
  for (uint32_t i = 0; i < count; i++) order[i] = i;
  for (uint32_t i = (uint32_t)count; i > 1; i--) {
    const uint32_t j = mc_random_below(i), swapped = order[j];
    order[j] = order[i - 1];
    order[i - 1] = swapped;
  }
  sigaltstack(&own_stack, &old_stack);
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &action, &old_actions[i]);
  const int timed = start_timer(&timer, launch->seconds) == 0;
  if (sigsetjmp(failed, 1) == 0)
    for (uint32_t i = 0; i < count; i++) {
      mc_group_serial = i + 1;
      mc_run_threadgroup(order[i], arguments);
    }
  if (timed) timer_delete(timer);
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &old_actions[i], NULL);
  sigaltstack(&old_stack, NULL);
  mc_memory_end();
  free(order);
  order = NULL;
  mc_now = NULL;
  return 0;
}
