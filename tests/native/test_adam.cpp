// The native core of the CPU Adam without Python, for the sanitizers. Buffers are heap blocks of
// exactly the size that is said, so one element too far is an error. Exit status 0: all is well.

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "adam.h"
#include "rules.h"

using namespace infinity;

namespace {

std::atomic<int> failures{0};

#define CHECK(what, ...)                                      \
  do {                                                        \
    if (!(what)) {                                            \
      ++failures;                                             \
      std::fprintf(stderr, "line %d: %s: ", __LINE__, #what); \
      std::fprintf(stderr, __VA_ARGS__);                      \
      std::fputc('\n', stderr);                               \
    }                                                         \
  } while (0)

const Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
size_t width(Dtype d) { return d == Dtype::none ? 0 : d == Dtype::f32 ? 4 : d == Dtype::log8 ? 1 : 2; }
int64_t blocks_of(int64_t n, Dtype m) { return m == Dtype::log8 ? (n + kBlock - 1) / kBlock : 0; }

// `n` elements that begin `shift` elements into a block, and end at its end.
struct Block {
  std::unique_ptr<unsigned char[]> memory;
  size_t size, skip;
  Block(int64_t n, size_t element, int64_t shift)
      : memory(new unsigned char[(n + shift) * element]), size(n * element), skip(shift * element) {
    std::memset(memory.get(), 0, size + skip);
  }
  void* data() const { return memory.get() + skip; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  bool operator==(const Block& b) const { return size == b.size && !std::memcmp(data(), b.data(), size); }
};

void fill(float* p, int64_t n, uint32_t seed, bool positive = false) {
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    p[i] = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-30f;
    if ((seed >> 8) % 50 == 0) p[i] *= 1e-40f;
    if (positive) p[i] = p[i] * p[i];
  }
}

// Any codes, whose values are about 2^exponent at most; where a block is one of zeros, its scale is, too.
void fill_codes(uint8_t* codes, uint32_t* scales, int64_t n, uint32_t seed, bool squares, uint32_t exponent) {
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const bool zeros = i / kBlock % 5 == 4;
    codes[i] = zeros ? 0 : static_cast<uint8_t>(seed >> 24);
    const uint32_t top = (127u + exponent - static_cast<uint32_t>(i / kBlock % 3)) << 3;
    scales[i / kBlock] = zeros ? 0 : (top - (squares ? 255u : 127u)) << 20;
  }
}

// Its indices within the parameter cross 2^32.
Segment whole(int64_t n) {
  return {0, n, (int64_t{1} << 32) - 40, 3, 1e-3, 0.1, 0.5, 0.9, 0.999, 1e-8, 77, 1, 0, {}};
}

struct State {
  Block master, exp_avg, exp_avg_sq, scales, square_scales, grad, out;
  Dtype grad_dtype, out_dtype, moment_dtype;
  Rule rule;
  bool split;  // of the master, only the lower halves are there; `out` has the upper ones
  State(int64_t n, Dtype g, Dtype o, int64_t shift, Dtype m = Dtype::f32, Rule r = Rule::adam,
        bool halves = false)
      : master(n, halves ? 2 : 4, shift),
        exp_avg(n, width(m), shift),
        exp_avg_sq(n, width(m), shift),
        scales(blocks_of(n, m), 4, shift),
        square_scales(blocks_of(n, m), 4, shift),
        grad(n, width(g), shift),
        out(n, width(o), shift),
        grad_dtype(g),
        out_dtype(o),
        moment_dtype(m),
        rule(r),
        split(halves) {
    std::vector<float> wide(n);
    fill(wide.data(), n, 1);
    if (n) std::memcpy(master.data(), wide.data(), master.size);  // any lower halves will do
    if (split) convert(out.data(), o, wide.data(), Dtype::f32, n);
    fill(wide.data(), n, 2);
    convert(exp_avg.data(), m, wide.data(), Dtype::f32, n);
    fill(wide.data(), n, 3, true);
    convert(exp_avg_sq.data(), m, wide.data(), Dtype::f32, n);
    fill(wide.data(), n, 4);
    convert(grad.data(), g, wide.data(), Dtype::f32, n);
    if (m != Dtype::log8) return;
    const bool squares = r == Rule::adagrad;  // of whose one moment
    fill_codes(exp_avg.as<uint8_t>(), scales.as<uint32_t>(), n, 5, squares, squares ? 4 : 1);
    fill_codes(exp_avg_sq.as<uint8_t>(), square_scales.as<uint32_t>(), n, 6, true, 2);
  }
  Buffers buffers() const {
    return {
        split ? nullptr : master.as<float>(),
        {rule == Rule::plain ? nullptr : exp_avg.data(), rule == Rule::adam ? exp_avg_sq.data() : nullptr},
        grad.data(),
        out_dtype == Dtype::none ? nullptr : out.data(),
        moment_dtype,
        grad_dtype,
        out_dtype,
        rule,
        {moment_dtype == Dtype::log8 && rule != Rule::plain ? scales.as<uint32_t>() : nullptr,
         moment_dtype == Dtype::log8 && rule == Rule::adam ? square_scales.as<uint32_t>() : nullptr},
        split ? master.as<uint16_t>() : nullptr};
  }
  // As `update` has it of a million elements or more: it writes `out` past the caches.
  void update_past_the_caches(const Segment& s) const {
    Scalars scalars = derive(rule, s);
    for (int64_t begin = 0, end; begin < s.numel; begin = end) {
      const uint64_t index = static_cast<uint64_t>(s.first + begin);
      const int64_t same = (int64_t{1} << 32) - static_cast<int64_t>(index & 0xffffffffu);
      end = s.numel - begin < same ? s.numel : begin + same;
      scalars.upper = static_cast<uint32_t>(index >> 32), scalars.first = static_cast<uint32_t>(index);
      kernels().update(buffers(), s.start + begin, s.start + end, scalars, true);
    }
  }
  bool operator==(const State& s) const {
    return master == s.master && exp_avg == s.exp_avg && exp_avg_sq == s.exp_avg_sq && out == s.out &&
           scales == s.scales && square_scales == s.square_scales;
  }
};

// Elements of a gap between segments are as they were.
void check_gap(Dtype g, Dtype o, Rule rule, Dtype m, bool split, int64_t n, const State& before) {
  const int64_t begin = n / kBlock * kBlock, end = kBlock + 44;
  Segment parts[2] = {whole(n), whole(n)};
  parts[0].first = (int64_t{1} << 32) - 2 * kBlock, parts[0].numel = end;
  parts[1].first = parts[0].first + begin, parts[1].start = begin, parts[1].numel = n - begin;
  State gap(n, g, o, 5, m, rule, split);
  update(gap.buffers(), parts, 2);
  auto kept = [&](Block State::* of, int64_t from, int64_t to, int64_t all) {
    const size_t element = (gap.*of).size / all;
    const char *a = (gap.*of).as<char>(), *b = (before.*of).as<char>();
    return !std::memcmp(a + from * element, b + from * element, (to - from) * element);
  };
  for (Block State::* of : {&State::master, &State::exp_avg, &State::exp_avg_sq, &State::out})
    CHECK(kept(of, end, begin, n), "rule %d, moments %d, %s", int(rule), int(m), kernels().name);
  for (Block State::* of : {&State::scales, &State::square_scales})
    if (m == Dtype::log8)
      CHECK(kept(of, 2, begin / kBlock, blocks_of(n, m)), "rule %d, %s", int(rule), kernels().name);
}

// Of every rule, with moments, gradients and copies of every dtype, with a split master or a whole one:
// wherever the state begins and a segment is cut (of codes between blocks), and past the caches.
void every_isa_gives_the_same_bits() {
  const char* names[3];
  const int count = available_isas(names);
  for (Rule rule : {Rule::adam, Rule::plain, Rule::momentum, Rule::adagrad, Rule::lion})
    for (Dtype m : {Dtype::f32, Dtype::bf16, Dtype::log8})
      for (Dtype g : kDtypes)
        for (Dtype o : {Dtype::none, Dtype::f32, Dtype::bf16, Dtype::f16})
          for (int64_t n : {0, 1, 15, 33, 256, 257, 1000, 2003, 10007})  // the last is several tasks
            for (bool split : {false, true}) {
              if (split ? o != Dtype::bf16 : n > 2003 && (g != Dtype::bf16 || o != Dtype::bf16)) continue;
              Segment s = whole(n);
              s.first = (int64_t{1} << 32) - (m == Dtype::log8 ? 2 * kBlock : 40);
              if (g == Dtype::f32) s.flag = 0, s.maximize = 1, s.a = 0.2;
              CHECK(use_isa("scalar"), "scalar");
              State expected(n, g, o, 0, m, rule, split), before(n, g, o, 0, m, rule, split);
              update(expected.buffers(), &s, 1);
              CHECK(n == 0 || !(expected.master == before.master), "rule %d", int(rule));
              if (m == Dtype::log8 && n)
                CHECK((expected.exp_avg == before.exp_avg) == (rule == Rule::plain), "rule %d", int(rule));
              const int64_t half = m == Dtype::log8 ? n / 2 / kBlock * kBlock : n / 3;
              for (int i = 0; i < count; ++i) {
                CHECK(use_isa(names[i]), "%s", names[i]);
                State found(n, g, o, 3, m, rule, split), cut(n, g, o, 1, m, rule, split);
                update(found.buffers(), &s, 1);
                Segment parts[2] = {s, s};
                parts[0].numel = half;
                parts[1].start = half, parts[1].first += half, parts[1].numel = n - half;
                update(cut.buffers(), parts, 2);
                bool same = found == expected && cut == expected;
                if (o != Dtype::none) {
                  State past(n, g, o, 5, m, rule, split);
                  past.update_past_the_caches(s);
                  same = same && past == expected;
                }
                CHECK(same, "%s n=%d rule=%d moments=%d grad=%d out=%d split=%d", names[i], int(n), int(rule),
                      int(m), int(g), int(o), int(split));
                if (n == 2003) check_gap(g, o, rule, m, split, n, before);
              }
            }
  CHECK(!use_isa("sse9"), "an unknown name is accepted");
#ifdef __AARCH64EL__
  CHECK(count > 1 && !std::strcmp(names[1], "neon"), "%s", names[count - 1]);
#endif
}

#ifdef __AARCH64EL__
// Also for the workers that it starts from then on. Without SVE nothing changes.
void a_thread_can_change_the_length_of_its_vectors() {
  const int64_t n = 100003;
  const char* names[3];
  const char* widest = names[available_isas(names) - 1];
  Segment s = whole(n);
  State expected(n, Dtype::bf16, Dtype::bf16, 0);
  use_isa("scalar");
  update(expected.buffers(), &s, 1);
  CHECK(use_isa(widest), "%s", widest);
  for (unsigned long nbytes : {16, 32, 64})
    std::thread([&] {
      prctl(PR_SVE_SET_VL, nbytes);
      for (int threads : {3, 1, 3}) {
        set_threads(threads);
        State found(n, Dtype::bf16, Dtype::bf16, 1);
        update(found.buffers(), &s, 1);
        CHECK(found == expected, "%s, %d bytes, %d threads", widest, int(nbytes), threads);
      }
      const char* here[3];
      const int count = available_isas(here);
      CHECK(!std::strcmp(here[count - 1], kernels().name) || kernels().name == names[1], "%s",
            kernels().name);
    }).join();
}
#endif

void the_traffic_of_an_update_moves_what_it_says() {
  const int64_t n = (1 << 20) + 13;
  State moved(n, Dtype::bf16, Dtype::bf16, 0), as_it_was(n, Dtype::bf16, Dtype::bf16, 0);
  measure(moved.buffers(), n, true);
  CHECK(moved.out == moved.grad, "the traffic of an update copies the gradient");
  CHECK(moved.master == as_it_was.exp_avg, "the traffic of an update turns the state round");
}

// Infinities, NaNs, zeros, subnormals, the ends of the dtypes' ranges, ties of their roundings.
const uint32_t kSpecial[] = {
    0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001,  // 0, Inf, NaN
    0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x80800000, 0x7f7fffff, 0xff7fffff,  // of fp32
    0x33000000, 0x33000001, 0xb87fe000, 0x38800000, 0x477ff000, 0xc77fefff,              // of fp16
    0x3f808000, 0x3f818000, 0xbf807fff, 0x7f7f8000, 0x3f800000, 0xbf800000, 0x1e3ce508,  // of bf16
};

void fill_special(float* p, int64_t n, uint32_t seed) {
  fill(p, n, seed);
  std::mt19937 random(seed);
  for (int64_t i = 0; i < n; ++i)
    if (uint32_t k = random() % (2 * std::size(kSpecial)); k < std::size(kSpecial))
      std::memcpy(p + i, kSpecial + k, 4);
}

void make_special(State& s, int64_t n, const std::vector<float> (&wide)[4]) {
  use_isa("scalar");
  auto put = [&](const Block& to, Dtype d, const std::vector<float>& values) {
    convert(to.data(), d, values.data(), Dtype::f32, n);  // nothing, to codes
  };
  if (s.split) put(s.out, s.out_dtype, wide[0]);
  else put(s.master, Dtype::f32, wide[0]);
  put(s.exp_avg, s.moment_dtype, wide[1]);
  put(s.exp_avg_sq, s.moment_dtype, wide[2]);
  put(s.grad, s.grad_dtype, wide[3]);
  for (int64_t k = 1; k < blocks_of(n, s.moment_dtype); k += 3)  // the last codes are Inf and NaN
    s.scales.as<uint32_t>()[k] = s.square_scales.as<uint32_t>()[k] = (0x7fcu - 127u) << 20;
}

// The same bits, any NaN being as good as another: which of two operands' it is, the compiler may choose.
bool same_values(const Block& a, const Block& b, int64_t n, Dtype d) {
  if (a == b || d == Dtype::none || d == Dtype::log8) return a == b;
  std::vector<uint32_t> x(n), y(n);
  use_isa("scalar");
  convert(x.data(), Dtype::f32, a.data(), d, n);
  convert(y.data(), Dtype::f32, b.data(), d, n);
  for (int64_t i = 0; i < n; ++i)
    if (x[i] != y[i] && (x[i] << 1 <= 0xff000000u || y[i] << 1 <= 0xff000000u)) return false;
  return true;
}

// Of codes with a sign and the same scales: the sign of a NaN is as good as another.
bool same_codes(const Block& a, const Block& b, const Block& scales, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = a.as<uint8_t>()[i], y = b.as<uint8_t>()[i];
    const bool nan = ((x & 127u) << 20) + scales.as<uint32_t>()[i / kBlock] > 0x7f800000u;
    if (x != y && !(nan && (x ^ y) == 128u)) return false;
  }
  return true;
}

void special_values_have_the_same_bits() {
  const char* names[3];
  const int count = available_isas(names);
  const int64_t n = 2003;
  std::vector<float> wide[4];
  for (uint32_t k = 0; k < 4; ++k) wide[k].resize(n), fill_special(wide[k].data(), n, k + 1);
  for (Rule rule : {Rule::adam, Rule::plain, Rule::momentum, Rule::adagrad, Rule::lion})
    for (Dtype m : {Dtype::f32, Dtype::bf16, Dtype::log8})
      for (Dtype g : kDtypes)
        for (Dtype o : {Dtype::none, Dtype::f32, Dtype::bf16, Dtype::f16})
          for (bool split : {false, true}) {
            if (split && o != Dtype::bf16) continue;
            Segment s = whole(n);
            s.first = (int64_t{1} << 32) - 2 * kBlock;
            if (g == Dtype::bf16) s.flag = 0, s.maximize = 1, s.a = 0.2;  // weight decay in the gradient
            if (g == Dtype::f16) s.weight_decay = 0, s.step = 1, s.c = 0;
            State expected(n, g, o, 0, m, rule, split);
            make_special(expected, n, wide);
            use_isa("scalar");
            update(expected.buffers(), &s, 1);
            for (int i = 1; i < count; ++i) {
              State found(n, g, o, 1, m, rule, split);
              make_special(found, n, wide);
              use_isa(names[i]);
              update(found.buffers(), &s, 1);
              bool same = found.scales == expected.scales && found.square_scales == expected.square_scales;
              same = same && (split ? found.master == expected.master
                                    : same_values(found.master, expected.master, n, Dtype::f32));
              same = same && same_values(found.out, expected.out, n, o);
              same = same && (m == Dtype::log8 && rule != Rule::adagrad
                                  ? same_codes(found.exp_avg, expected.exp_avg, found.scales, n)
                                  : same_values(found.exp_avg, expected.exp_avg, n, m));
              same = same && same_values(found.exp_avg_sq, expected.exp_avg_sq, n, m);
              CHECK(same, "%s rule=%d moments=%d grad=%d out=%d split=%d", names[i], int(rule), int(m),
                    int(g), int(o), int(split));
            }
          }
}

void gaps_are_not_touched() {
  const int64_t n = 50021;
  State found(n, Dtype::f32, Dtype::bf16, 0), before(n, Dtype::f32, Dtype::bf16, 0);
  std::vector<Segment> segments;
  std::vector<bool> covered(n, false);
  std::mt19937 random(5);
  for (int64_t at = 0; at < n;) {
    Segment s = whole(static_cast<int64_t>(random() % 90));
    s.start = at;
    s.step = 1 + segments.size() % 5;
    if (at + s.numel > n) break;
    segments.push_back(s);
    for (int64_t k = 0; k < s.numel; ++k) covered[at + k] = true;
    at += s.numel + static_cast<int64_t>(random() % 3);
  }
  int64_t index = -1;
  CHECK(!check(Rule::adam, segments.data(), segments.size(), n, &index), "segment %d", int(index));
  update(found.buffers(), segments.data(), segments.size());
  State apart(n, Dtype::f32, Dtype::bf16, 0);
  for (const Segment& s : segments) update(apart.buffers(), &s, 1);
  CHECK(found == apart, "one call and many calls differ");
  for (int64_t i = 0; i < n; ++i) {
    if (covered[i]) continue;
    CHECK(found.master.as<float>()[i] == before.master.as<float>()[i], "element %d", int(i));
    CHECK(found.out.as<uint16_t>()[i] == 0, "element %d", int(i));
  }
  segments[1].start = n;
  segments[1].numel = 1;
  CHECK(check(Rule::adam, segments.data(), segments.size(), n, &index) && index == 1, "segment %d",
        int(index));
  segments[1].numel = INT64_MAX;
  CHECK(check(Rule::adam, segments.data(), segments.size(), n, &index), "an overflow is accepted");
}

void sums_and_conversions_agree() {
  const char* names[3];
  int count = available_isas(names);
  for (int64_t n : {0, 1, 127, 128, 129, 65535, 70001})
    for (Dtype d : kDtypes)
      for (int64_t shift : {0, 1}) {
        State s(n, d, Dtype::none, shift);
        std::vector<Piece> pieces;  // whole spans, and odd ones between
        for (int64_t at = 0; at < n;) {
          int64_t left = n - at, size = pieces.size() % 3 == 1 ? 777 : kSpan;
          pieces.push_back({at, left < size ? left : size});
          at += pieces.back().numel;
        }
        const int64_t several = static_cast<int64_t>(pieces.size());
        std::vector<double> expected(pieces.size()), found(pieces.size());
        Block first(n, 4, 0), sum(n, 4, shift);
        use_isa("scalar");
        sum_of_squares(s.grad.data(), d, pieces.data(), several, expected.data());
        convert(first.data(), Dtype::f32, s.grad.data(), d, n);
        accumulate(first.as<float>(), s.grad.data(), d, n);
        for (int i = 0; i < count; ++i) {
          use_isa(names[i]);
          sum_of_squares(s.grad.data(), d, pieces.data(), several, found.data());
          CHECK(found == expected, "%s n=%d", names[i], int(n));
          convert(sum.data(), Dtype::f32, s.grad.data(), d, n);
          accumulate(sum.as<float>(), s.grad.data(), d, n);
          CHECK(sum == first, "%s n=%d", names[i], int(n));
        }
      }
  // Every float32 pattern of a stride that meets all exponents and all low bits.
  std::vector<uint32_t> patterns;
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 19937) patterns.push_back(static_cast<uint32_t>(bits));
  int64_t n = static_cast<int64_t>(patterns.size());
  for (Dtype d : {Dtype::bf16, Dtype::f16}) {
    std::vector<uint16_t> expected(n), found(n);
    use_isa("scalar");
    convert(expected.data(), d, patterns.data(), Dtype::f32, n);
    for (int i = 0; i < count; ++i) {
      use_isa(names[i]);
      convert(found.data(), d, patterns.data(), Dtype::f32, n);
      CHECK(found == expected, "%s", names[i]);
    }
  }
}

void several_threads_share_the_pool() {
  const int64_t n = 50021;
  Segment s = whole(n);
  State expected(n, Dtype::bf16, Dtype::bf16, 0);
  update(expected.buffers(), &s, 1);
  std::vector<std::thread> callers;
  for (int k = 0; k < 4; ++k)
    callers.emplace_back([&, k] {
      for (int round = 0; round < 6; ++round) {
        if (k == 0) set_threads(1 + round);
        State found(n, Dtype::bf16, Dtype::bf16, k);
        update(found.buffers(), &s, 1);
        CHECK(found == expected, "caller %d", k);
        Block copy(n, 4, 0);
        copy_bytes(copy.data(), found.master.data(), n * 4);
        CHECK(!std::memcmp(copy.data(), expected.master.data(), n * 4), "caller %d", k);
      }
    });
  for (std::thread& caller : callers) caller.join();
  std::atomic<int64_t> sum{0};
  for (int64_t tasks : {0, 1, 2, 1000}) {
    sum = 0;
    parallel(tasks, [&](int64_t i) { sum += i + 1; });
    CHECK(sum == tasks * (tasks + 1) / 2, "%d tasks", int(tasks));
  }
}

void a_forked_child_has_its_own_pool() {
  set_threads(3);
  const int64_t n = 100003;
  Segment s = whole(n);
  State expected(n, Dtype::f32, Dtype::bf16, 0);
  update(expected.buffers(), &s, 1);
  pid_t child = fork();
  if (child == 0) {
    alarm(30);
    State found(n, Dtype::f32, Dtype::bf16, 0);
    update(found.buffers(), &s, 1);
    _exit(found == expected ? 0 : 3);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0, "status %d", status);
}

}  // namespace

int main(int argc, char** argv) {
  const bool with_fork = argc > 1 && !std::strcmp(argv[1], "fork");
  set_threads(3);
  if (argc > 2) CHECK(!std::strcmp(kernels().name, argv[2]), "%s", kernels().name);
  every_isa_gives_the_same_bits();
  special_values_have_the_same_bits();
  the_traffic_of_an_update_moves_what_it_says();
  gaps_are_not_touched();
  sums_and_conversions_agree();
  several_threads_share_the_pool();
#ifdef __AARCH64EL__
  a_thread_can_change_the_length_of_its_vectors();
#endif
  if (with_fork) a_forked_child_has_its_own_pool();
  if (!failures) std::puts("ok");
  return failures ? 1 : 0;
}
