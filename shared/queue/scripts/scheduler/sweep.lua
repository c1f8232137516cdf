-- Removes what dead processes have left, and ends waiting requests whose time is up. Once a second, by any scheduler.
-- ARGV: closing (6), ms that a request waits for a decoder with the weights that it began with while there are only others,
--   its ending then.  Returns how many ended
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

-- What decoders are there, and which content has the one that was loaded last of those that schedulers have bound: it gets
-- the new requests. One that none can bind, as another model or out of reach, must not keep them from the others. Where
-- nobody says what is bound, all count.
local served = {}
for _, contents in ipairs(redis.call('HVALS', P .. ':served')) do
  for content in string.gmatch(contents, '%S+') do served[content] = true end
end
local is_there, num_decoders = {}, 0
local alive, of_all, of_served = {}, {ms = -1}, {ms = -1}
for _, did in ipairs(redis.call('ZRANGEBYSCORE', P .. ':instances:decoder', now_ms, '+inf')) do alive[did] = true end
local said = redis.call('HGETALL', P .. ':contents')
for i = 1, #said, 2 do
  if alive[said[i]] then
    local loaded_ms, content = string.match(said[i + 1], '^(%S+) (%S+)$')
    num_decoders = num_decoders + 1
    is_there[content] = true
    for _, latest in ipairs(served[content] and {of_all, of_served} or {of_all}) do
      if tonumber(loaded_ms) > latest.ms then latest.content, latest.ms = content, tonumber(loaded_ms) end
    end
  elseif not redis.call('ZSCORE', P .. ':instances:decoder', said[i]) then
    redis.call('HDEL', P .. ':contents', said[i])
  end
end
local newest = of_served.content and of_served or of_all
if newest.content then
  redis.call('HSET', P .. ':meta', 'content', newest.content, 'content_ms', int(newest.ms))
else
  redis.call('HDEL', P .. ':meta', 'content', 'content_ms')
end

-- Requests that have begun and wait for a decoder with the same weights. Where there is no decoder at all they wait as
-- all others do.
local begun = redis.call('HGETALL', P .. ':wanted')
local missing = {}
for i = 1, #begun, 2 do
  local rid, content = begun[i], begun[i + 1]
  if num_decoders > 0 and not is_there[content] then
    missing[content] = true
    redis.call('HSETNX', P .. ':missing', content, int(now_ms))
    if now_ms - tonumber(redis.call('HGET', P .. ':missing', content)) >= tonumber(ARGV[7]) then
      dequeue(rid)
      end_all(rid, ARGV[8], close.keep_s)
      ended = ended + 1
    end
  end
end
for _, content in ipairs(redis.call('HKEYS', P .. ':missing')) do
  if not missing[content] then redis.call('HDEL', P .. ':missing', content) end
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

for _, key in ipairs({P .. ':load', P .. ':served'}) do
  for _, sid in ipairs(redis.call('HKEYS', key)) do
    if not redis.call('ZSCORE', P .. ':scheds', sid) then redis.call('HDEL', key, sid) end
  end
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
