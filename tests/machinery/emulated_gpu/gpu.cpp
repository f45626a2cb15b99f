// What cuda_runtime.h declares: one thread block at a time, its threads as coroutines on stacks of their own.

#include "cuda_runtime.h"

#include <ucontext.h>

#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

namespace emulated {

Index thread, block;
long launches = 0, argument_bytes = 0;

namespace {

constexpr size_t kStack = 64 * 1024;

enum class Waits { kNot, kForOr, kForShuffle, kDone };

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  Waits waits;
  int flag;
  double value;
  int distance;
};

ucontext_t scheduler;
std::vector<Thread> threads(1024);
const std::function<void()>* body;
std::mt19937 random_numbers(1);
int any_flag;

void wait(Waits what) {
  Thread& mine = threads[thread.x];
  mine.waits = what;
  swapcontext(&mine.context, &scheduler);
}

void entry() {
  (*body)();
  wait(Waits::kDone);
}

void meet(int count) {
  for (int index = 1; index < count; ++index) {
    if (threads[index].waits != threads[0].waits) {
      std::fprintf(stderr, "thread %d is not at the barrier that thread 0 is at\n", index);
      std::abort();
    }
  }
  if (threads[0].waits == Waits::kForOr) {
    any_flag = 0;
    for (int index = 0; index < count; ++index) {
      any_flag |= threads[index].flag;
    }
  } else if (threads[0].waits == Waits::kForShuffle) {
    std::vector<double> values;
    for (int index = 0; index < count; ++index) {
      values.push_back(threads[index].value);
    }
    for (int index = 0; index < count; ++index) {
      const int distance = threads[index].distance;
      threads[index].value = values[index % 32 + distance < 32 ? index + distance : index];
    }
  }
}

void run_block(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (int index : order) {
    Thread& each = threads[index];
    getcontext(&each.context);
    each.context.uc_stack.ss_sp = each.stack.data();
    each.context.uc_stack.ss_size = each.stack.size();
    each.context.uc_link = nullptr;
    makecontext(&each.context, entry, 0);
    each.waits = Waits::kNot;
  }
  while (threads[0].waits != Waits::kDone) {
    std::shuffle(order.begin(), order.end(), random_numbers);
    for (int index : order) {
      if (threads[index].waits != Waits::kDone) {
        thread.x = index;
        swapcontext(&scheduler, &threads[index].context);
      }
    }
    meet(count);
  }
}

}  // namespace

int sync_or(int value) {
  threads[thread.x].flag = value;
  wait(Waits::kForOr);
  return any_flag;
}

double shuffle_down(double value, int distance) {
  Thread& mine = threads[thread.x];
  mine.value = value;
  mine.distance = distance;
  wait(Waits::kForShuffle);
  return mine.value;
}

void run(int64_t blocks, int count, const std::function<void()>& kernel) {
  body = &kernel;
  std::vector<int64_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_numbers);
  for (int64_t index : order) {
    block.x = static_cast<unsigned>(index);
    run_block(count);
  }
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"))) long emulated_launches() {
  return emulated::launches;
}

extern "C" __attribute__((visibility("default"))) long emulated_argument_bytes() {
  return emulated::argument_bytes;
}
