// The CPU Adam: what the files of this directory know of each other.
//
// No Python.h here: plain C++ programs link adam_*.cpp, dispatch.cpp and pool.cpp and run them
// under sanitizers. Everything is addresses and counts, so one build serves every torch.

#pragma once

#include <cstdint>

namespace infinity {

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2, none = 3, log8 = 4 };
enum class Rule : int32_t;  // rules.h

constexpr int64_t kSpan = 65536;  // elements of one sum of squares
constexpr int64_t kBlock = 256;   // elements that share a scale, of moments in 8 bits

// One parameter's part of a chunk and the scalars of its update, as the caller has them.
// Python packs this struct (struct format "<qqqqddddddI??2x"), so its layout is fixed.
struct Segment {
  int64_t start, numel;  // elements, within the chunk
  int64_t first;         // of its first element, the index within the parameter
  int64_t step;          // the first update is step 1
  double lr, weight_decay, grad_scale;
  double a, b, c;  // of the rule: beta1, beta2, eps · momentum, dampening · lr_decay, eps · beta1, beta2
  uint32_t key;    // of stochastic rounding
  uint8_t flag;    // of the rule: decoupled weight decay · nesterov
  uint8_t maximize, unused[2];
};
static_assert(sizeof(Segment) == 88, "Python packs 88 bytes");

// Elements whose squares are summed as one tree. Python passes an array of these (int64, two columns).
struct Piece {
  int64_t begin, numel;
};
static_assert(sizeof(Piece) == 16, "Python passes 16 bytes each");

// The constants of one segment's arithmetic: computed in double, rounded to float once.
struct Scalars {
  float grad_scale;  // negative to maximize
  float decay;       // 1 - lr * weight_decay where it is decoupled, or 1
  float l2;          // weight_decay where it is not, or 0
  float x[6];        // of the rule, as rules.h says
  bool flag;
  uint32_t key;           // of stochastic rounding
  uint32_t upper, first;  // halves of the index of the first element within the parameter; upper: of all
};

struct Buffers {
  float* master;     // null where it is split
  void* moments[2];  // null where the rule has fewer
  const void* grad;
  void* out;                                  // null with Dtype::none
  Dtype moment_dtype, grad_dtype, out_dtype;  // of moments, f32, bf16 or log8
  Rule rule;
  uint32_t* scales[2];  // of moments in log8, one of each block of the chunk
  uint16_t* low;        // of a split master, whose upper half is `out`, in bf16; null: `master` is whole
};

// One instruction set's functions. Each works on elements [begin, end) on the calling thread.
struct Kernels {
  const char* name;
  // `stream`: write `out` past the caches.
  void (*update)(const Buffers&, int64_t begin, int64_t end, const Scalars&, bool stream);
  // The same loads and stores without the arithmetic: what memory allows (see measure()).
  void (*traffic)(const Buffers&, int64_t begin, int64_t end, bool stream);
  double (*sum_span)(const void* source, Dtype, int64_t begin, int64_t numel);  // numel <= kSpan
  void (*accumulate)(float* target, const void* source, Dtype, int64_t begin, int64_t end);
  void (*convert)(void* target, Dtype, const void* source, Dtype, int64_t begin, int64_t end);
  int sve_bits = 0;  // not 0: works only in threads whose SVE vectors have this length
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();    // null where it was not compiled
const Kernels* avx512_kernels();  // null where it was not compiled
const Kernels* neon_kernels();    // null where it was not compiled
const Kernels* sve256_kernels();  // null where it was not compiled
const Kernels* sve512_kernels();  // null where it was not compiled

// ---- dispatch.cpp: which instruction set, and the work of one call spread over the pool ----

// The instruction set in use: the one that was asked for, else the widest that works here; NEON in a thread
// whose vectors have another length than that one's.
const Kernels& kernels();
// Ask for one by name. Returns false, and changes nothing, if it is unknown or does not work here.
bool use_isa(const char* name);
// Fills `names` with those that work here, widest last; returns how many (at most 3).
int available_isas(const char* names[3]);

Scalars derive(Rule, const Segment&);
// Returns null, or what is wrong with segment `*index`.
const char* check(Rule, const Segment*, int64_t count, int64_t numel, int64_t* index);

// Updates the segments, which check() has passed; elements outside them are not touched.
void update(const Buffers&, const Segment*, int64_t count);
// Moves the bytes of an update of `numel` elements, without its arithmetic.
void measure(const Buffers&, int64_t numel, bool stream);
// sums[i]: double sum of squares of piece i, which is at most kSpan elements.
void sum_of_squares(const void* source, Dtype, const Piece* pieces, int64_t count, double* sums);
void accumulate(float* target, const void* source, Dtype, int64_t numel);
void convert(void* target, Dtype, const void* source, Dtype, int64_t numel);
void copy_bytes(void* target, const void* source, int64_t nbytes);

// ---- pool.cpp: threads ----

int threads();
// Threads that one call uses, the caller's included; 0: one per core this process may use,
// divided by LOCAL_WORLD_SIZE.
void set_threads(int count);
// Calls work(context, i) for every i in [0, tasks), on the pool and on the calling thread.
void parallel(int64_t tasks, void (*work)(void* context, int64_t task), void* context);

template <class F>
void parallel(int64_t tasks, F&& work) {
  parallel(tasks, [](void* context, int64_t task) { (*static_cast<F*>(context))(task); }, &work);
}

}  // namespace infinity
