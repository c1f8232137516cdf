// Whether streams use memory in an order that somebody has asked for. Kernels are told from Python, copies and
// collectives are seen here; an access that no wait puts behind an earlier one of another stream, where one of the two
// writes, is reported, whatever the bytes came to be.
#include "runtime.h"

namespace fake {

// Of accesses that the host has never waited for; more than any step makes.
static constexpr size_t most_kept = 1 << 17;
static int unseen;

static bool overlap(const Access &access, const char *begin, const char *end) {
  return access.begin < end && begin < access.end;
}

// The first operation of `before` that nothing puts ahead of what `later` does now; the host, where that is null.
static uint64_t first_unordered(const Stream *later, const Stream *before) {
  if (!later) return before->done + 1;
  auto waited = later->waited.find(before->id);
  return std::max(before->done, waited == later->waited.end() ? 0 : waited->second) + 1;
}

void access(Stream *stream, const void *place, size_t bytes, bool writes) {
  auto begin = static_cast<const char *>(place), end = begin + bytes;
  static const bool is_on = setting("FAKE_NPU_ORDER", 1);
  if (!bytes || !is_on) return;
  for (auto other : all_streams()) {
    auto &kept = other->accesses;
    while (!kept.empty() && (kept.front().sequence <= other->done || kept.size() > most_kept)) kept.pop_front();
    if (other == stream) continue;
    uint64_t first = first_unordered(stream, other);
    for (auto one = kept.rbegin(); one != kept.rend() && one->sequence >= first; ++one) {
      if (!(writes || one->writes) || !overlap(*one, begin, end)) continue;
      count(unordered);
      unseen++;
      say("stream %d %s %zu bytes at %p that stream %d %s, in no order: operation %lu of it is not waited for",
          stream ? stream->id : -1, writes ? "writes" : "reads", bytes, place, other->id,
          one->writes ? "writes" : "reads", static_cast<unsigned long>(one->sequence));
      return;
    }
  }
  if (stream) stream->accesses.push_back({begin, end, stream->sequence, writes});
}

void forget_accesses(const char *begin, size_t bytes) {
  for (auto stream : all_streams()) {
    std::deque<Access> kept;
    for (auto &one : stream->accesses)
      if (!overlap(one, begin, begin + bytes)) kept.push_back(one);
    stream->accesses.swap(kept);
  }
}

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

// A kernel in Python comes next on this stream: what was submitted there before has happened by then.
void fake_launch(aclrtStream on) {
  fake::Lock lock(fake::mutex);
  auto stream = fake::stream_of(on);
  fake::perform(stream, stream->sequence++);
  fake::count(fake::kernel);
}

struct Range {
  const void *begin;
  size_t bytes;
  int64_t writes;
};

// What that kernel uses. Returns how many accesses in no order were found since the last call, copies' too.
int fake_access(aclrtStream on, const Range *ranges, int number) {
  fake::Lock lock(fake::mutex);
  auto stream = fake::stream_of(on);
  for (int i = 0; i < number; i++) fake::access(stream, ranges[i].begin, ranges[i].bytes, ranges[i].writes);
  int found = fake::unseen;
  fake::unseen = 0;
  return found;
}
}
