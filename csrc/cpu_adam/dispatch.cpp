// Which instruction set runs, and how the work of one call is spread over the pool.

#include <atomic>
#include <cmath>
#include <cstring>

#include "adam.h"
#include "rules.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif
#ifdef __AARCH64EL__
#include <sys/auxv.h>
#endif

namespace infinity {
namespace {

#if defined(__x86_64__) || defined(__i386__)
bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
// __builtin_cpu_supports asks the operating system too: it must save the wide registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

// The length of the calling thread's SVE vectors; 0: it has none.
int sve_bits() {
  int64_t bits = 0;
#ifdef __AARCH64EL__
  if (getauxval(AT_HWCAP) & HWCAP_SVE) asm volatile(".arch_extension sve\n\trdvl %0, #8" : "=r"(bits));
#endif
  return static_cast<int>(bits);
}

// Those that work here, widest last.
int usable(const Kernels* found[3]) {
  int count = 0;
  found[count++] = scalar_kernels();
  if (avx2_kernels() && has_avx2()) found[count++] = avx2_kernels();
  if (avx512_kernels() && has_avx512()) found[count++] = avx512_kernels();
  if (neon_kernels()) found[count++] = neon_kernels();
  if (sve256_kernels() && sve_bits() == 256) found[count++] = sve256_kernels();
  if (sve512_kernels() && sve_bits() == 512) found[count++] = sve512_kernels();
  return count;
}

std::atomic<const Kernels*> chosen{nullptr};

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kGrain = kBlock;  // elements; a task's share is a multiple: its lines are its own

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements per task: enough tasks that threads end together, each long enough to be worth it.
int64_t share(int64_t numel) {
  int64_t size = ceil_div(numel, 8 * static_cast<int64_t>(threads()));
  if (size > 65536) size = 65536;
  if (size < 4096) size = 4096;
  return ceil_div(size, kGrain) * kGrain;
}

template <class Each>
void in_shares(int64_t numel, Each&& each) {
  int64_t size = share(numel);
  parallel(ceil_div(numel, size), [&](int64_t task) {
    int64_t begin = task * size, end = begin + size;
    each(begin, end < numel ? end : numel);
  });
}

bool past_caches(const Buffers& b, int64_t numel) {
  if (b.out_dtype == Dtype::none || numel < kMiB) return false;
  uintptr_t element = b.out_dtype == Dtype::f32 ? 4 : 2;
  return reinterpret_cast<uintptr_t>(b.out) % element == 0;
}

}  // namespace

// With vectors of another length the numbers would be wrong. prctl changes the length for the thread that
// calls it, and for those that this thread starts later. So each task asks in the thread that runs it.
const Kernels& kernels() {
  const Kernels* found = chosen.load(std::memory_order_relaxed);
  if (!found) {
    const Kernels* all[3];
    found = all[usable(all) - 1];
    chosen.store(found, std::memory_order_relaxed);
  }
  if (found->sve_bits && found->sve_bits != sve_bits()) return *neon_kernels();
  return *found;
}

bool use_isa(const char* name) {
  const Kernels* all[3];
  int count = usable(all);
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(all[i]->name, name) == 0) {
      chosen.store(all[i], std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

int available_isas(const char* names[3]) {
  const Kernels* all[3];
  int count = usable(all);
  for (int i = 0; i < count; ++i) names[i] = all[i]->name;
  return count;
}

namespace {

// Calls each(rule) with a value of the struct of a rule.
template <class Each>
auto with_rule(Rule rule, Each&& each) {
  switch (rule) {
#define INFINITY_CALL(name, type) \
  case Rule::name:                \
    return each(type());
    INFINITY_RULES(INFINITY_CALL)
#undef INFINITY_CALL
  }
  return each(AdamRule());  // no other rule has a number
}

}  // namespace

Scalars derive(Rule rule, const Segment& s) {
  Scalars r{};
  const bool decoupled = with_rule(rule, [&](auto of) { return decltype(of)::is_decoupled(s); });
  r.grad_scale = static_cast<float>(s.maximize ? -s.grad_scale : s.grad_scale);
  r.decay = decoupled ? static_cast<float>(1.0 - s.lr * s.weight_decay) : 1.0f;
  r.l2 = decoupled ? 0.0f : static_cast<float>(s.weight_decay);
  r.key = s.key;
  with_rule(rule, [&](auto of) { return decltype(of)::derive(s, r); });
  return r;
}

const char* check(Rule rule, const Segment* segments, int64_t count, int64_t numel, int64_t* index) {
  int64_t reached = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Segment& s = segments[i];
    *index = i;
    if (s.start < 0 || s.numel < 0 || s.start > numel || s.numel > numel - s.start)
      return "lies outside the chunk";
    if (s.start < reached) return "begins before the end of the segment before it";
    if (s.step < 1) return "has a step below 1";
    if (s.first < 0) return "begins before its parameter";
    if (!with_rule(rule, [&](auto of) { return decltype(of)::is_valid(s); }))
      return "has a beta outside [0, 1)";
    reached = s.start + s.numel;
  }
  return nullptr;
}

void update(const Buffers& b, const Segment* segments, int64_t count) {
  // Tasks are equal cuts of the elements that are updated, wherever these are, so many tiny
  // segments balance as one large one does. The cuts keep to multiples of a grain in the chunk
  // where a segment begins at one. Moments in 8 bits are cut between blocks, so each segment counts whole
  // ones.
  const int64_t block = b.moment_dtype == Dtype::log8 ? kBlock : 1;
  auto length = [&](const Segment& s) { return ceil_div(s.numel, block) * block; };
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += length(segments[i]);
  if (total == 0) return;
  const bool stream = past_caches(b, total);
  int64_t size = share(total);
  struct Cut {
    int64_t segment, skip;  // where a task begins: elements into that segment
  };
  int64_t tasks = ceil_div(total, size);
  Cut* cuts = new Cut[static_cast<size_t>(tasks)];
  int64_t passed = 0, next = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (; next < tasks && next * size < passed + length(segments[i]); ++next)
      cuts[next] = {i, next * size - passed};
    passed += length(segments[i]);
  }
  parallel(tasks, [&](int64_t task) {
    const Kernels& k = kernels();
    int64_t left = size;
    int64_t i = cuts[task].segment, skip = cuts[task].skip;
    for (; left > 0 && i < count; ++i, skip = 0) {
      const Segment& s = segments[i];
      int64_t n = length(s) - skip;
      if (n > left) n = left;
      if (n <= 0) continue;
      Scalars scalars = derive(b.rule, s);
      const int64_t last = s.start + (skip + n < s.numel ? skip + n : s.numel);
      for (int64_t begin = s.start + skip, end = last; begin < end;) {
        const uint64_t index = static_cast<uint64_t>(s.first + begin - s.start);
        const int64_t same = (int64_t{1} << 32) - static_cast<int64_t>(index & 0xffffffffu);
        const int64_t next = end - begin < same ? end : begin + same;  // where the upper half changes
        scalars.upper = static_cast<uint32_t>(index >> 32);
        scalars.first = static_cast<uint32_t>(index);
        k.update(b, begin, next, scalars, stream);
        begin = next;
      }
      left -= n;
    }
  });
  delete[] cuts;
}

void measure(const Buffers& b, int64_t numel, bool stream) {
  in_shares(numel, [&](int64_t begin, int64_t end) { kernels().traffic(b, begin, end, stream); });
}

void sum_of_squares(const void* source, Dtype dtype, const Piece* pieces, int64_t count, double* sums) {
  parallel(count,
           [&](int64_t i) { sums[i] = kernels().sum_span(source, dtype, pieces[i].begin, pieces[i].numel); });
}

void accumulate(float* target, const void* source, Dtype dtype, int64_t numel) {
  in_shares(numel,
            [&](int64_t begin, int64_t end) { kernels().accumulate(target, source, dtype, begin, end); });
}

void convert(void* target, Dtype to, const void* source, Dtype from, int64_t numel) {
  in_shares(numel,
            [&](int64_t begin, int64_t end) { kernels().convert(target, to, source, from, begin, end); });
}

void copy_bytes(void* target, const void* source, int64_t nbytes) {
  // Few large parts: memcpy then writes past the caches when the whole is larger than they are.
  int64_t parts = threads();
  if (nbytes < parts * kMiB) parts = ceil_div(nbytes, kMiB);
  if (parts < 1) return;
  int64_t size = ceil_div(ceil_div(nbytes, parts), 4096) * 4096;
  parallel(ceil_div(nbytes, size), [&](int64_t part) {
    int64_t begin = part * size, n = nbytes - begin < size ? nbytes - begin : size;
    std::memcpy(static_cast<char*>(target) + begin, static_cast<const char*>(source) + begin,
                static_cast<size_t>(n));
  });
}

}  // namespace infinity
