-- Follows the prelude in scripts that move requests in and out of the queue.

-- Every script that may end a waiting request begins with these arguments: how long an ended one is kept, how long
-- followers have to call again after Redis was away, and the endings.
local function closing()
  return {keep_s = ARGV[1], grace_ms = tonumber(ARGV[2]), cancelled = ARGV[3], queue = ARGV[4], first_token = ARGV[5],
    total = ARGV[6]}
end

local function varint(n)
  local out = ''
  while n >= 128 do
    out = out .. string.char(n % 128 + 128)
    n = math.floor(n / 128)
  end
  return out .. string.char(n)
end

-- A serialized LogBatch with one LogEvent {request_id = 1, choice = 2, ending = 5}.
local function ending_event(rid, choice, ending)
  local event = '\10' .. varint(#rid) .. rid
  if choice > 0 then event = event .. '\16' .. varint(choice) end
  event = event .. '\42' .. varint(#ending) .. ending
  return '\10' .. varint(#event) .. event
end

-- Writes `ending` for every open choice of a request that no scheduler runs, and notifies followers.
local function end_all(rid, ending, keep_s)
  local r = request(rid)
  local events = {}
  for c = 0, tonumber(redis.call('HGET', r, 'n')) - 1 do
    if redis.call('HSETNX', r, 'e' .. c, ending) == 1 then
      events[#events + 1] = ending_event(rid, c, ending)
    end
  end
  redis.call('HSET', r, 'open', 0)
  retire(rid, keep_s)
  redis.call('PUBLISH', P .. ':tok', table.concat(events))
end

-- Time

-- Since when Redis has been up without a break. Schedulers call every second; where none did, Redis was away (or no
-- scheduler lived), and followers could not renew what they follow.
local function up_since_ms(now_ms)
  local f = redis.call('HMGET', P .. ':meta', 'checked_ms', 'up_since_ms')
  redis.call('HSET', P .. ':meta', 'checked_ms', int(now_ms))
  if f[1] and now_ms - tonumber(f[1]) < 3000 then return tonumber(f[2]) end
  redis.call('HSET', P .. ':meta', 'up_since_ms', int(now_ms))
  return now_ms
end

-- Until when a request counts as followed; math.huge if it needs no follower.
local function followed_until(follow_until_ms, up_since, grace_ms)
  if tonumber(follow_until_ms or 0) == 0 then return math.huge end
  return math.max(tonumber(follow_until_ms), up_since + grace_ms)
end

-- Until when (ms) a waiting request may wait, and the ending that it gets then. math.huge if for ever.
local function may_wait_until(rid, up_since, close)
  local f = redis.call('HMGET', request(rid), 'cancel', 'follow_until_ms', 'arrived_ms', 'timeout_ms', 'queue_timeout_ms',
    'taken_ms', 'first_token_timeout_ms', 'first_token_ms')
  if f[1] == '1' then return 0, close.cancelled end
  if not f[3] then return math.huge end
  local moment, ending = followed_until(f[2], up_since, close.grace_ms), close.cancelled
  local function within(ms, what)
    if tonumber(ms) > 0 and f[3] + ms < moment then moment, ending = f[3] + ms, what end
  end
  within(f[4], close.total)
  if f[6] == '0' then within(f[5], close.queue) end
  if not f[8] then within(f[7], close.first_token) end
  return moment, ending
end

-- Places in the queue

local function free_late_reservations(now_ms)
  for _, late in ipairs(redis.call('ZRANGEBYSCORE', P .. ':resv', '-inf', now_ms)) do
    redis.call('ZREM', P .. ':resv', late)
    forget_live(late)
  end
end

-- The counter of a tenant that nothing is known of: the lowest of those that wait, else that of the last one served.
local function floor_of(prio)
  local lowest = redis.call('ZRANGE', P .. ':tenants:' .. prio, 0, 0, 'WITHSCORES')[2]
  return tonumber(lowest or redis.call('HGET', P .. ':meta', 'floor:' .. prio) or 0)
end

-- Notes with which content a waiting request has begun, if it has.
local function note_begun(rid)
  local content = redis.call('HGET', request(rid), 'content')
  if content then redis.call('HSET', P .. ':wanted', rid, content) end
end

local function waiting_of(prio, tenant) return P .. ':w:' .. prio .. ':' .. tenant end

-- Those of them that have waited longer than the goal for their first token.
local function late_of(prio, tenant) return P .. ':late:' .. prio .. ':' .. tenant end

-- Whether a waiting request comes behind others once it has waited too long. Not one that was taken before, that its
-- client put before others, or that says how long it may wait: it ends then. Nobody looks at batch work.
local function may_be_late(rid, prio, rank)
  local f = redis.call('HMGET', request(rid), 'taken_ms', 'queue_timeout_ms', 'first_token_timeout_ms', 'arrived_ms')
  return prio == 'interactive' and f[1] == '0' and f[2] == '0' and f[3] == '0' and tonumber(rank) >= f[4] * 1000
    and redis.call('SISMEMBER', P .. ':begun', rid) == 0
end

-- Puts a request at its rank among the waiting. A tenant that comes back starts no lower than the lowest active one.
local function enqueue(rid, prio, tenant, rank, close)
  local tenants, rested = P .. ':tenants:' .. prio, P .. ':idle:' .. prio
  if not redis.call('ZSCORE', tenants, tenant) then
    local floor = floor_of(prio)
    local counter = tonumber(redis.call('ZSCORE', rested, tenant) or floor)
    redis.call('ZREM', rested, tenant)
    redis.call('ZADD', tenants, math.max(floor, counter), tenant)
  end
  redis.call('ZADD', waiting_of(prio, tenant), rank, rid)
  if may_be_late(rid, prio, rank) then redis.call('ZADD', P .. ':goal', rank, rid) end
  note_begun(rid)
  local moment = may_wait_until(rid, 0, close)
  if moment < math.huge then redis.call('ZADD', P .. ':due', moment, rid) end
  redis.call('PUBLISH', P .. ':ctl', 'q')
end

local function dequeue(rid)
  local f = redis.call('HMGET', request(rid), 'prio', 'tenant')
  local waiting, late, tenants = waiting_of(f[1], f[2]), late_of(f[1], f[2]), P .. ':tenants:' .. f[1]
  redis.call('ZREM', waiting, rid)
  redis.call('ZREM', late, rid)
  redis.call('ZREM', P .. ':goal', rid)
  redis.call('ZREM', P .. ':due', rid)
  redis.call('HDEL', P .. ':wanted', rid)
  if redis.call('EXISTS', waiting, late) > 0 then return end
  redis.call('HDEL', P .. ':turns', f[2])
  local counter = redis.call('ZSCORE', tenants, f[2])
  if counter then
    redis.call('ZREM', tenants, f[2])
    redis.call('ZADD', P .. ':idle:' .. f[1], counter, f[2])
  end
end

-- A waiting request of which is known by now that it has begun goes back to its rank.
local function keep_place(rid)
  local f = redis.call('HMGET', request(rid), 'prio', 'tenant', 'rank')
  if not redis.call('ZSCORE', P .. ':goal', rid) or may_be_late(rid, f[1], f[3]) then return end
  redis.call('ZREM', P .. ':goal', rid)
  if redis.call('ZREM', late_of(f[1], f[2]), rid) == 1 then redis.call('ZADD', waiting_of(f[1], f[2]), f[3], rid) end
end

-- Ends a waiting request if its time is up. Returns whether it did.
local function end_if_due(rid, now_ms, up_since, close)
  local moment, ending = may_wait_until(rid, up_since, close)
  if moment > now_ms then return false end
  dequeue(rid)
  end_all(rid, ending, close.keep_s)
  return true
end

-- Takes a running request away from its owner and puts it back at the head, unless its time is up.
local function put_back(rid, close)
  local r = request(rid)
  local f = redis.call('HMGET', r, 'state', 'owner', 'prio', 'tenant', 'rank')
  if f[1] ~= 'running' then return end
  redis.call('SREM', P .. ':own:' .. f[2], rid)
  redis.call('HSET', r, 'state', 'queued', 'owner', '')
  charge(rid, 0)
  enqueue(rid, f[3], f[4], f[5], close)
  local now_ms = math.floor(now_us() / 1000)
  end_if_due(rid, now_ms, up_since_ms(now_ms), close)
end

-- How many decoders were lost while they computed a request: the largest number known counts.
local function keep_lost_decoders(rid, lost_decoders)
  local r = request(rid)
  if tonumber(lost_decoders) > tonumber(redis.call('HGET', r, 'lost_decoders') or 0) then
    redis.call('HSET', r, 'lost_decoders', lost_decoders)
  end
end

-- The arguments of a request, as `admit` and `restore` get them from argument `i` on.
local function request_at(i)
  return {rid = ARGV[i], spec = ARGV[i + 1], head = ARGV[i + 2], prio = ARGV[i + 3], tenant = ARGV[i + 4],
    cost = ARGV[i + 5], n = ARGV[i + 6], prompt_tokens = ARGV[i + 7], stride = ARGV[i + 8], media_cost = ARGV[i + 9],
    timeout_ms = ARGV[i + 10], queue_timeout_ms = ARGV[i + 11], first_token_timeout_ms = ARGV[i + 12],
    idem = ARGV[i + 13], fingerprint = ARGV[i + 14], follow_ms = tonumber(ARGV[i + 15])}
end

-- Writes a request as one that waits, without a place in the queue yet.
local function create(q, now_ms, arrived_ms, rank)
  local follow_until_ms = q.follow_ms > 0 and now_ms + q.follow_ms or 0
  redis.call('HSET', request(q.rid), 'spec', q.spec, 'head', q.head, 'state', 'queued', 'owner', '', 'own_at', 0,
    'cancel', 0, 'arrived_ms', int(arrived_ms), 'rank', int(rank), 'prio', q.prio, 'tenant', q.tenant, 'cost', q.cost,
    'n', q.n, 'open', q.n, 'prompt_tokens', q.prompt_tokens, 'stride', q.stride, 'media_cost', q.media_cost,
    'timeout_ms', q.timeout_ms, 'queue_timeout_ms', q.queue_timeout_ms, 'first_token_timeout_ms',
    q.first_token_timeout_ms, 'follow_until_ms', int(follow_until_ms), 'taken_ms', 0, 'attempts', 0,
    'lost_decoders', 0, 'charged', 0, 'idem', q.idem)
  set_live(q.rid, q.cost)
end

-- Binds a request's idempotency key for as long as it lives. Returns the other request that has the key, if one does.
local function bind_key(q)
  if q.idem == '' then return end
  local known = redis.call('HGET', q.idem, 'rid')
  if known and known ~= q.rid and redis.call('EXISTS', request(known)) == 1 then return known end
  redis.call('HSET', q.idem, 'rid', q.rid)
  if not known or q.fingerprint ~= '' then redis.call('HSET', q.idem, 'fingerprint', q.fingerprint) end
  redis.call('PERSIST', q.idem)
end
