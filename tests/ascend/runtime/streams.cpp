// Streams and events: which operation comes after which. Waiting delivers the copies that are pending before it.
#include "runtime.h"

#include <algorithm>
#include <cstring>

namespace fake {

static std::vector<Stream *> streams;

static Stream *new_stream() {
  Lock lock(mutex);
  auto stream = new Stream;
  stream->id = int(streams.size());
  streams.push_back(stream);
  return stream;
}

const std::vector<Stream *> &all_streams() { return streams; }

Stream *stream_of(aclrtStream stream) {
  static Stream *standard = new_stream();
  return stream ? static_cast<Stream *>(stream) : standard;
}

// Ends the copies of `stream` up to an operation: the host sees what was copied, and what it gave away is compared.
static void deliver(Stream *stream, uint64_t until) {
  stream->done = std::max(stream->done, until);
  perform(stream, until);
  for (auto copy = stream->pending.begin(); copy != stream->pending.end() && copy->sequence <= until;) {
    if (copy->to_host) {
      memcpy(copy->host, copy->content.data(), copy->bytes);
    } else if (memcmp(copy->host, copy->content.data(), copy->bytes)) {
      count(host_memory_changed);
      say("host memory %p (%zu bytes) changed while its copy to the device was under way", copy->host, copy->bytes);
    }
    copy = stream->pending.erase(copy);
  }
}

static void deliver_before(Stream *stream, uint64_t sequence, const std::map<int, uint64_t> &waited) {
  for (auto &[id, until] : waited) deliver(streams[id], until);
  deliver(stream, sequence);
}

static void join(Stream *stream) { deliver_before(stream, stream->sequence, stream->waited); }

bool comes_after(const Stream *later, int stream, uint64_t sequence) {
  auto waited = later->waited.find(stream);
  return streams[stream]->done >= sequence || later->id == stream ||
         (waited != later->waited.end() && waited->second >= sequence);
}

void forget_copies(const char *begin, size_t bytes) {
  auto touches = [=](const char *place) { return place >= begin && place < begin + bytes; };
  for (auto stream : streams) {
    for (auto &copy : stream->pending)
      if (touches(copy.host) || touches(copy.device)) perform(stream, copy.sequence);
    stream->pending.remove_if([=](const PendingCopy &copy) { return touches(copy.host); });
  }
}

static aclError make_stream(aclrtStream *stream) {
  FAKE_ALIVE;
  *stream = new_stream();
  return ACL_SUCCESS;
}

static aclError make_event(aclrtEvent *event) {
  FAKE_ALIVE;
  *event = new Event;
  return ACL_SUCCESS;
}

}  // namespace fake

using fake::Event;
using fake::Lock;
using fake::stream_of;

#pragma GCC visibility push(default)
extern "C" {

aclError aclrtCreateStream(aclrtStream *stream) { return fake::make_stream(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) { return fake::make_stream(stream); }
aclError aclrtCreateEvent(aclrtEvent *event) { return fake::make_event(event); }
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t) { return fake::make_event(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) { return fake::make_event(event); }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream on) {
  Lock lock(fake::mutex);
  FAKE_ALIVE;
  auto recorded = static_cast<Event *>(event);
  recorded->stream = stream_of(on);
  recorded->sequence = ++recorded->stream->sequence;
  recorded->waited = recorded->stream->waited;
  recorded->queries = 0;
  fake::count(fake::event_record);
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream waiting, aclrtEvent event) {
  Lock lock(fake::mutex);
  FAKE_ALIVE;
  auto source = static_cast<Event *>(event);
  fake::count(fake::event_wait);
  if (!source->stream) return ACL_SUCCESS;
  auto &waited = stream_of(waiting)->waited;
  waited[source->stream->id] = std::max(waited[source->stream->id], source->sequence);
  for (auto &[id, sequence] : source->waited) waited[id] = std::max(waited[id], sequence);
  // Whatever comes here next finds what those streams have done.
  for (auto &[id, sequence] : waited) fake::perform(fake::all_streams()[id], sequence);
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  Lock lock(fake::mutex);
  FAKE_ALIVE;
  auto source = static_cast<Event *>(event);
  fake::count(fake::synchronize_event);
  if (source->stream) fake::deliver_before(source->stream, source->sequence, source->waited);
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  Lock lock(fake::mutex);
  FAKE_ALIVE;
  fake::count(fake::synchronize_stream);
  fake::join(stream_of(stream));
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }

aclError aclrtSynchronizeDevice() {
  Lock lock(fake::mutex);
  FAKE_ALIVE;
  fake::count(fake::synchronize_device);
  for (auto stream : fake::streams) fake::join(stream);
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

// An event is found unfinished once, and finished when asked again: a program must bear both.
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  Lock lock(fake::mutex);
  FAKE_ALIVE;
  auto source = static_cast<Event *>(event);
  bool done = !source->stream || source->queries++ > 0;
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  if (done && source->stream) fake::deliver_before(source->stream, source->sequence, source->waited);
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  Lock lock(fake::mutex);
  FAKE_ALIVE;
  fake::join(stream_of(stream));
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent, aclrtEvent) {
  *milliseconds = 0.01f;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
  *id = stream_of(stream)->id;
  return ACL_SUCCESS;
}

aclError aclrtGetStreamId(aclrtStream stream, int32_t *id) { return aclrtStreamGetId(stream, id); }
}
