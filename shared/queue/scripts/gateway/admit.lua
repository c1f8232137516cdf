-- Accepts a prepared request: its reservation becomes its exact cost, and it waits. Cannot fail on limits.
-- ARGV: closing (6), request (16), us by which the rank is advanced
-- Returns {'OK', arrival in ms of Redis TIME} | {'EXISTS', rid of another request with the same idempotency key}
local close, q = closing(), request_at(7)
local now = now_us()
local now_ms = math.floor(now / 1000)
if redis.call('EXISTS', request(q.rid)) == 1 then
  return {'OK', tonumber(redis.call('HGET', request(q.rid), 'arrived_ms'))}
end
redis.call('ZREM', P .. ':resv', q.rid)
local known = bind_key(q)
if known then
  forget_live(q.rid)
  return {'EXISTS', known}
end
local rank = now - tonumber(ARGV[23])
create(q, now_ms, now_ms, rank)
enqueue(q.rid, q.prio, q.tenant, int(rank), close)
return {'OK', now_ms}
