// The threads of the CPU Adam. Our own, because torchrun sets OMP_NUM_THREADS=1 and torch's
// thread count is the user's.
//
// Workers sleep on a condition variable. A call puts its job, which lives on the caller's stack,
// on a list, works on it itself, and returns when nobody works on it any more; so several Python
// threads may call at once. A forked child has no workers and cannot trust the locks: it finds
// another process id and starts a pool of its own, the parent's being left as it is.

#include <cfenv>
#include <condition_variable>
#include <atomic>
#include <cstdlib>
#include <mutex>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include "adam.h"

namespace infinity {
namespace {

// Nearest-even, subnormals kept, whatever the calling thread has set (torch.set_flush_denormal).
class PlainArithmetic {
 public:
  PlainArithmetic() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~PlainArithmetic() { fesetenv(&saved_); }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;

 private:
  fenv_t saved_;
};

struct Job {
  int64_t tasks;
  void (*work)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
  int helpers = 0;  // workers that hold this job; under the pool's lock
  Job* following = nullptr;

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= tasks; }
  void run() {
    for (;;) {
      int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      work(context, task);
    }
  }
};

class Pool {
 public:
  explicit Pool(int threads) : pid(getpid()), threads_(threads) {}

  const pid_t pid;
  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void resize(int threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    threads_.store(threads, std::memory_order_relaxed);
    wake_.notify_all();  // those that are too many leave
  }

  void run(Job& job) {
    int64_t helpers = threads() - 1;
    if (helpers > job.tasks - 1) helpers = job.tasks - 1;
    if (helpers > 0) submit(job, static_cast<int>(helpers));
    {
      PlainArithmetic plain;
      job.run();
    }
    if (helpers > 0) retire(job);
  }

 private:
  void submit(Job& job, int helpers) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < threads() - 1 && start()) ++workers_;
      Job** end = &jobs_;
      while (*end) end = &(*end)->following;
      *end = &job;
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
  }

  void retire(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    Job** link = &jobs_;
    while (*link != &job) link = &(*link)->following;
    *link = job.following;
    left_.wait(lock, [&] { return job.helpers == 0; });
  }

  bool start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the caller's threads
    pthread_t thread;
    bool started = pthread_create(&thread, nullptr, &Pool::serve, this) == 0;
    if (started) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;  // with fewer threads the work is done all the same
  }

  static void* serve(void* self) {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "infinity-adam");
#endif
    fesetenv(FE_DFL_ENV);
    static_cast<Pool*>(self)->serve_jobs();
    return nullptr;
  }

  void serve_jobs() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (workers_ > threads() - 1) break;
      Job* job = jobs_;
      while (job && job->exhausted()) job = job->following;
      if (!job) {
        wake_.wait(lock);
        continue;
      }
      ++job->helpers;
      lock.unlock();
      job->run();
      lock.lock();
      if (--job->helpers == 0) left_.notify_all();
    }
    --workers_;
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  Job* jobs_ = nullptr;
  int workers_ = 0;
  std::atomic<int> threads_;
};

int default_threads() {
  int cores = 1;
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  else  // more than 1024 processors
#endif
    cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const char* text = std::getenv("LOCAL_WORLD_SIZE");
  long ranks = text ? std::strtol(text, nullptr, 10) : 1;
  if (ranks > 1) cores = static_cast<int>(cores / ranks);
  return cores < 1 ? 1 : cores;
}

// Never destroyed: workers may be asleep in it when the process ends.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found && found->pid == getpid()) return *found;
  Pool* fresh = new Pool(found ? found->threads() : default_threads());
  if (current.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;  // another thread was first
  return *found;
}

}  // namespace

int threads() { return pool().threads(); }

void set_threads(int count) { pool().resize(count > 0 ? count : default_threads()); }

void parallel(int64_t tasks, void (*work)(void*, int64_t), void* context) {
  if (tasks <= 0) return;
  Job job{tasks, work, context};
  pool().run(job);
}

}  // namespace infinity
