-- Removes what dead processes have left, and ends waiting requests whose time is up. Once a second, by any scheduler.
-- ARGV: closing (6).  Returns how many ended
local close = closing()
local now_ms = math.floor(now_us() / 1000)
local up_since = up_since_ms(now_ms)
if redis.call('EXISTS', P .. ':recovery') == 1 then return 0 end
free_late_reservations(now_ms)

local ended = 0
for _, rid in ipairs(redis.call('ZRANGEBYSCORE', P .. ':due', '-inf', now_ms, 'LIMIT', 0, 1000)) do
  if end_if_due(rid, now_ms, up_since, close) then
    ended = ended + 1
  else
    redis.call('ZADD', P .. ':due', (may_wait_until(rid, up_since, close)), rid)
  end
end

-- A tenant that does not wait starts at the lowest counter at least: a lower one says nothing. Where nobody waits, no
-- counter does.
for _, prio in ipairs({'interactive', 'batch'}) do
  if redis.call('EXISTS', P .. ':tenants:' .. prio) == 1 then
    redis.call('ZREMRANGEBYSCORE', P .. ':idle:' .. prio, '-inf', floor_of(prio))
  else
    redis.call('DEL', P .. ':idle:' .. prio)
    redis.call('HDEL', P .. ':meta', 'floor:' .. prio)
  end
end

for _, sid in ipairs(redis.call('HKEYS', P .. ':load')) do
  if not redis.call('ZSCORE', P .. ':scheds', sid) then redis.call('HDEL', P .. ':load', sid) end
end

-- A decoder that is neither bound nor announced is gone, and never comes back under the same name.
for _, did in ipairs(redis.call('HKEYS', P .. ':leases')) do
  local sid = redis.call('HGET', P .. ':bound', did)
  local is_bound = sid and redis.call('ZSCORE', P .. ':scheds', sid)
  if not is_bound and not redis.call('ZSCORE', P .. ':instances:decoder', did) then
    redis.call('HDEL', P .. ':leases', did)
    redis.call('HDEL', P .. ':bound', did)
  end
end
return ended
