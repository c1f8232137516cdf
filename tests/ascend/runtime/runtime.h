// What the parts of the simulated Ascend runtime share: counters, planted faults, streams, memory.
//
// Device memory is host memory. Nothing runs by itself: a kernel has run when its call returns. A copy between host and
// device happens as late as it may: when the next kernel of its stream comes, or somebody waits for it. On the host side
// it takes effect only when its stream or an event behind it is waited for.
#pragma once
#include <acl/acl.h>
#include <acl/acl_rt.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <vector>

// The names of counters, in order; Python reads them from `fake_counter_names`.
#define FAKE_COUNTERS(X)                                                                      \
  X(synchronize_stream) X(synchronize_event) X(synchronize_device) X(copy_blocking)           \
  X(copy_h2d) X(copy_d2h) X(copy_d2d) X(copy_h2d_pageable) X(copy_d2h_pageable)               \
  X(bytes_h2d) X(bytes_d2h) X(malloc) X(event_record) X(event_wait) X(replay) X(collective)   \
  X(host_memory_changed) X(kernel) X(fallback) X(unordered)

// Faults that a test may plant, by the number of calls after which they happen (0: never).
#define FAKE_FAULTS(X) X(malloc_in) X(malloc_failures) X(kernel_in) X(kernel_error) X(lost) X(faulted)

namespace fake {

enum Counter {
#define X(name) name,
  FAKE_COUNTERS(X)
#undef X
  counters
};
enum FaultKind {
#define X(name) fault_##name,
  FAKE_FAULTS(X)
#undef X
  faults
};

// Lies in a file when FAKE_NPU_REPORTS names a folder (`<folder>/<process id>`), so that a test reads the counters of
// another process and plants faults in it. Python knows this layout (simulator/runtime.py).
struct Report {
  int64_t counter[64];
  int64_t fault[64];
  char message[1024];
};

struct PendingCopy {
  char *host, *device;
  size_t bytes;
  bool to_host;
  std::vector<char> content;  // of the source: on the host when it was issued, on the device when it happened
  uint64_t sequence;          // of the operation on its stream
  bool happened;
};

// Of memory of the device, by an operation of a stream.
struct Access {
  const char *begin, *end;
  uint64_t sequence;
  bool writes;
};

struct Stream {
  int id;
  uint64_t sequence = 0;            // operations so far
  uint64_t done = 0;                // those that the host has waited for
  std::map<int, uint64_t> waited;   // of other streams: the operations that this one comes after
  std::list<PendingCopy> pending;
  std::deque<Access> accesses;      // of those that the host has not waited for
};

struct Event {
  Stream *stream = nullptr;
  uint64_t sequence = 0;
  std::map<int, uint64_t> waited;
  int queries = 0;
};

extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

Report &report();
void count(Counter what, int64_t by = 1);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
aclError broken();  // with what every call fails: the device is lost, or a kernel of this process failed; else 0
constexpr aclError kernel_fault = 507015;

size_t setting(const char *name, size_t otherwise);
const char *soc();

// Memory that CANN takes for itself: torch does not know of it, and nobody frees it. Whether there is so much.
bool take_for_cann(size_t bytes);
size_t scaled(size_t bytes);  // of the sizes of a real device of this kind, what is simulated

bool is_device_memory(const void *pointer);
bool is_pinned_memory(const void *pointer);

Stream *stream_of(aclrtStream stream);  // the default stream for a null pointer
const std::vector<Stream *> &all_streams();
bool comes_after(const Stream *later, int stream, uint64_t sequence);  // than that operation
void perform(Stream *stream, uint64_t until);                          // the copies that it has not made yet
void access(Stream *stream, const void *place, size_t bytes, bool writes);  // by its last operation, or by the host
bool is_capturing();

// Before memory goes: what is under way there ends, and what has used it is of no matter any more.
void forget_copies(const char *begin, size_t bytes);
void forget_accesses(const char *begin, size_t bytes);

// What Python does at certain calls (simulator/graphs.py); `what` is a Hook.
enum Hook { capture_begin = 1, capture_end, execute, group_begin, group_end, update_begin, update_end };
void call_hook(Hook what, void *a, void *b);

}  // namespace fake

#define FAKE_ALIVE \
  if (aclError error = fake::broken()) return error
