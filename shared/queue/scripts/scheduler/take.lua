-- Pops the fairest waiting requests and makes the caller their owner. One that has begun goes on with the weights that it
-- began with; all others go to the content whose decoder was loaded last, of those that schedulers have bound (`sweep`).
-- ARGV: closing (6), sid, ms that an interactive request waits until it comes behind those that have not waited so long (0:
-- it never does), and of each content (hex) that decoders of the caller have: it, max requests, max tokens (of
-- prompts, media and expected outputs; the first is taken anyway). While no decoder has said what it has, the first of
-- them gets the new requests.
-- Returns {'RECOVERING'} | {'GONE'}
--   | {'OK', {spec, own_at, arrived_ms, {log0, e0, log1, e1, ...}, prio, prompt log, rank, attempts,
--     decoders lost with it, content to run it with, numerics that it has begun in, whether its logs are inexact}, ...}
local LOOK = 1024  -- so many waiting requests of a tenant, where the first ones are for other decoders
local TURN_OF_LATE = 20  -- every so manyth request of a tenant that has late ones is the first of these
local MOVED = 1000  -- requests that become late in one call at the most
local close, sid, late_after_ms = closing(), ARGV[7], tonumber(ARGV[8])
if redis.call('EXISTS', P .. ':recovery') == 1 then return {'RECOVERING'} end
if not redis.call('ZSCORE', P .. ':scheds', sid) then return {'GONE'} end
local now = now_us()
local now_ms = math.floor(now / 1000)
local up_since = up_since_ms(now_ms)
local meta = redis.call('HMGET', P .. ':meta', 'mean_output', 'takes', 'content')
local mean_output, takes, newest = tonumber(meta[1] or math.huge), tonumber(meta[2] or 0), meta[3] or ARGV[9]
local places = {}  -- content -> what its decoders can still begin with
for i = 9, #ARGV, 3 do
  places[ARGV[i]] = {requests = tonumber(ARGV[i + 1]), tokens = tonumber(ARGV[i + 2]), is_first = true}
end
local passed = {interactive = {}, batch = {}}  -- tenants of whose requests none is for the caller
local num_passed = {interactive = 0, batch = 0}
local taken = {'OK'}

local function has_place(content)
  return places[content] and places[content].requests > 0
end

-- The tenant with waiting work that was served least; every tenth request is taken from batch work.
local function next_tenant()
  local first, second = 'interactive', 'batch'
  if takes % 10 == 9 then first, second = second, first end
  for _, prio in ipairs({first, second}) do
    local tenants = redis.call('ZRANGE', P .. ':tenants:' .. prio, 0, num_passed[prio], 'WITHSCORES')
    for i = 1, #tenants, 2 do
      if not passed[prio][tenants[i]] then return prio, tenants[i], tenants[i + 1] end
    end
  end
end

-- Moves those behind the others that have waited too long.
local function move_late()
  if late_after_ms == 0 then return end
  local latest = int(now - 1000 * late_after_ms)
  for _, rid in ipairs(redis.call('ZRANGEBYSCORE', P .. ':goal', '-inf', latest, 'LIMIT', 0, MOVED)) do
    local f = redis.call('HMGET', request(rid), 'prio', 'tenant', 'rank')
    if f[1] and redis.call('ZREM', waiting_of(f[1], f[2]), rid) == 1 then
      redis.call('ZADD', late_of(f[1], f[2]), f[3], rid)
      redis.call('ZADD', P .. ':goal', '+inf', rid)
    else
      redis.call('ZREM', P .. ':goal', rid)  -- deleted by hand
    end
  end
end

-- The first of the waiting requests with these ranks that has a place at a decoder of the caller, and the content there.
local function with_place(waiting, lowest, highest)
  for _, count in ipairs({1, LOOK}) do
    for _, rid in ipairs(redis.call('ZRANGEBYSCORE', waiting, lowest, highest, 'LIMIT', 0, count)) do
      local f = redis.call('HMGET', request(rid), 'state', 'content')
      local content = f[2] or newest
      if f[1] ~= 'queued' then
        redis.call('ZREM', waiting, rid)  -- deleted by hand: it must not block the others
        redis.call('ZREM', P .. ':goal', rid)
      elseif has_place(content) then
        return rid, content
      end
    end
  end
end

-- The first of a tenant's that has a place. Late ones come behind those that came (or, put behind others by their client,
-- count as having come) by now; so that none waits for ever, some turns are theirs, but not before what was taken before.
local function first_with_place(waiting, late, tenant)
  if redis.call('EXISTS', late) == 0 then return with_place(waiting, '-inf', '+inf') end
  local by_now = {waiting, '-inf', int(now)}
  local order = {by_now, {late, '-inf', '+inf'}, {waiting, '(' .. int(now), '+inf'}}
  if tonumber(redis.call('HGET', P .. ':turns', tenant) or 0) >= TURN_OF_LATE - 1 then
    local first = redis.call('ZRANGE', waiting, 0, 0)[1]
    if not first or redis.call('HGET', request(first), 'taken_ms') == '0' then table.insert(order, 1, order[2]) end
  end
  for _, range in ipairs(order) do
    local rid, content = with_place(unpack(range))
    if rid then return rid, content end
  end
end

-- Counts the turns of a tenant that has late requests, since the last one that was a late one's.
local function count_turn(rid)
  local f = redis.call('HMGET', request(rid), 'prio', 'tenant')
  local late = late_of(f[1], f[2])
  if redis.call('ZSCORE', late, rid) then
    redis.call('HDEL', P .. ':turns', f[2])
  elseif redis.call('EXISTS', late) == 1 then
    redis.call('HINCRBY', P .. ':turns', f[2], 1)
  end
end

-- Of the requests that have begun, the first that has a place: for a caller that gets no new ones.
local function begun_with_place()
  local begun = redis.call('HGETALL', P .. ':wanted')
  local found, content, least = nil, nil, math.huge
  for i = 1, #begun, 2 do
    if has_place(begun[i + 1]) then
      local rank = tonumber(redis.call('HGET', request(begun[i]), 'rank') or math.huge)
      if rank < least then found, content, least = begun[i], begun[i + 1], rank end
    end
  end
  return found, content
end

-- The same of all that wait, by tenants: rid, content, priority, the tenant's counter. False: look again.
local function fairest_with_place()
  local prio, tenant, counter = next_tenant()
  if not prio then return end
  local waiting, late = waiting_of(prio, tenant), late_of(prio, tenant)
  local rid, content = first_with_place(waiting, late, tenant)
  if rid then return rid, content, prio, counter end
  if redis.call('EXISTS', waiting, late) == 0 then
    redis.call('ZREM', P .. ':tenants:' .. prio, tenant)
  else
    passed[prio][tenant] = true
    num_passed[prio] = num_passed[prio] + 1
  end
  return false
end

local function expected_tokens(rid)
  local f = redis.call('HMGET', request(rid), 'cost', 'prompt_tokens', 'media_cost')
  return f[2] + f[3] + math.min(f[1] - f[2], mean_output)
end

local function own(rid, content)
  local r = request(rid)
  local f = redis.call('HMGET', r, 'spec', 'arrived_ms', 'n', 'prio', 'rank', 'taken_ms', 'lost_decoders',
    'numerics', 'inexact')
  redis.call('HSET', r, 'state', 'running', 'owner', sid, 'own_at', int(now))
  if f[6] == '0' then redis.call('HSET', r, 'taken_ms', int(now_ms)) end
  redis.call('SADD', P .. ':own:' .. sid, rid)
  local logs = {}
  for c = 0, tonumber(f[3]) - 1 do
    logs[#logs + 1] = redis.call('GET', log_of(rid, c)) or ''
    logs[#logs + 1] = redis.call('HGET', r, 'e' .. c) or ''
  end
  local prompt_log = redis.call('GET', log_of(rid, 'p')) or ''
  local attempts = redis.call('HINCRBY', r, 'attempts', 1)
  return {f[1], int(now), f[2], logs, f[4], prompt_log, f[5], attempts, f[7] or '0', content, f[8] or '', f[9] or '0'}
end

move_late()
while true do
  local rid, content, prio, counter
  if has_place(newest) then
    rid, content, prio, counter = fairest_with_place()
  else
    rid, content = begun_with_place()
  end
  if rid == nil then break end
  if rid and not end_if_due(rid, now_ms, up_since, close) then
    local tokens, place = expected_tokens(rid), places[content]
    if tokens > place.tokens and not place.is_first then
      place.requests = 0
    else
      if prio then redis.call('HSET', P .. ':meta', 'floor:' .. prio, counter) end
      charge(rid, tokens)
      count_turn(rid)
      dequeue(rid)
      taken[#taken + 1] = own(rid, content)
      place.requests = place.requests - 1
      place.tokens = place.tokens - tokens
      place.is_first = false
      takes = takes + 1
    end
  end
end
if #taken > 1 then redis.call('HSET', P .. ':meta', 'takes', takes) end
return taken
