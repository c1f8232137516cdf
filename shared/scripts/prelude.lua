-- Stands before every script. KEYS[1] is the model's prefix "t:{m}"; all other keys share its hash tag, so they are in
-- its slot. See shared/keys.py for the legend.
local P = KEYS[1]

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- Lua numbers print with 14 digits, microseconds have 16.
local function int(n) return string.format('%.0f', n) end

local function request(rid) return P .. ':r:' .. rid end

local function log_of(rid, c) return P .. ':l:' .. rid .. ':' .. c end

local function varint(n)
  local out = ''
  while n >= 128 do
    out = out .. string.char(n % 128 + 128)
    n = math.floor(n / 128)
  end
  return out .. string.char(n)
end

-- Reads a varint of `data` at index `at`: its value and the index behind it.
local function varint_at(data, at)
  local value, scale = 0, 1
  while true do
    local byte = string.byte(data, at)
    at = at + 1
    if byte < 128 then return value + byte * scale, at end
    value = value + (byte - 128) * scale
    scale = scale * 128
  end
end

-- A serialized LogBatch with one LogEvent {request_id = 1, choice = 2, ending = 5}.
local function ending_event(rid, choice, ending)
  local event = '\10' .. varint(#rid) .. rid
  if choice > 0 then event = event .. '\16' .. varint(choice) end
  event = event .. '\42' .. varint(#ending) .. ending
  return '\10' .. varint(#event) .. event
end

-- Every script that may end a waiting request begins with these arguments: how long an ended one is kept, how long
-- followers have to show up after Redis was away, and the endings.
local function closing()
  return {keep_s = ARGV[1], grace_ms = tonumber(ARGV[2]), cancelled = ARGV[3], queue = ARGV[4], first_token = ARGV[5],
    total = ARGV[6]}
end

-- What is counted against the limits

local function forget_live(rid)
  local cost = redis.call('HGET', P .. ':live', rid)
  if cost then
    redis.call('HDEL', P .. ':live', rid)
    redis.call('HINCRBY', P .. ':meta', 'live_tokens', -tonumber(cost))
  end
end

local function set_live(rid, cost)
  forget_live(rid)
  redis.call('HSET', P .. ':live', rid, cost)
  redis.call('HINCRBY', P .. ':meta', 'live_tokens', cost)
end

local function free_late_reservations(now_ms)
  for _, late in ipairs(redis.call('ZRANGEBYSCORE', P .. ':resv', '-inf', now_ms)) do
    redis.call('ZREM', P .. ':resv', late)
    forget_live(late)
  end
end

-- Fairness: each tenant has a counter of the tokens served to it, and the lowest is served first

-- Where a tenant begins that nothing is known of: at the lowest of those that wait, else where the last one served was.
local function floor_of(prio)
  local lowest = redis.call('ZRANGE', P .. ':tenants:' .. prio, 0, 0, 'WITHSCORES')[2]
  return tonumber(lowest or redis.call('HGET', P .. ':meta', 'floor:' .. prio) or 0)
end

-- Brings what its tenant has been charged for a request to `tokens`.
local function charge(rid, tokens)
  local f = redis.call('HMGET', request(rid), 'charged', 'tenant', 'prio')
  local more = tokens - tonumber(f[1] or 0)
  if more == 0 then return end
  redis.call('HSET', request(rid), 'charged', tokens)
  more = more / tonumber(redis.call('HGET', P .. ':weights', f[2]) or 1)
  if not redis.call('ZADD', P .. ':tenants:' .. f[3], 'XX', 'INCR', more, f[2]) then
    redis.call('ZADD', P .. ':rested:' .. f[3], 'XX', 'INCR', more, f[2])
  end
end

-- Endings

-- Whether a serialized Ending says "stop" or "length": its first field is the reason.
local function is_finish(ending)
  local tag, reason = string.byte(ending, 1, 2)
  return tag == 8 and (reason == 1 or reason == 2)
end

-- The idempotency key of a request that finished finds it as long as its log is kept; that of any other is free again.
local function settle_key(rid, finished, keep_s)
  local idem = redis.call('HGET', request(rid), 'idem')
  if not idem or idem == '' or redis.call('HGET', idem, 'rid') ~= rid then return end
  if finished then redis.call('EXPIRE', idem, keep_s) else redis.call('DEL', idem) end
end

-- What fairness expects of the next request follows what requests turn out to generate.
local function learn_output(tokens)
  local mean = redis.call('HGET', P .. ':meta', 'mean_output')
  if mean then tokens = tonumber(mean) + (tokens - tonumber(mean)) / 16 end
  redis.call('HSET', P .. ':meta', 'mean_output', tokens)
end

-- The request has no open choice left: it leaves the counters and lives on for late readers only.
local function retire(rid, keep_s)
  local r = request(rid)
  local f = redis.call('HMGET', r, 'n', 'owner', 'stride', 'prompt_tokens', 'media_cost')
  if f[2] and f[2] ~= '' then redis.call('SREM', P .. ':own:' .. f[2], rid) end
  local output, finished = 0, true
  for c = 0, tonumber(f[1]) - 1 do
    output = output + redis.call('STRLEN', log_of(rid, c)) / tonumber(f[3])
    finished = finished and is_finish(redis.call('HGET', r, 'e' .. c))
    redis.call('EXPIRE', log_of(rid, c), keep_s)
  end
  redis.call('EXPIRE', log_of(rid, 'p'), keep_s)
  if finished then learn_output(output) end
  local was_run = output > 0 or (f[2] and f[2] ~= '')
  charge(rid, was_run and f[4] + f[5] + output or 0)
  settle_key(rid, finished, keep_s)
  forget_live(rid)
  redis.call('HSET', r, 'state', 'ended', 'owner', '', 'ended_ms', int(math.floor(now_us() / 1000)))
  redis.call('HDEL', r, 'spec')
  redis.call('EXPIRE', r, keep_s)
end

-- Writes `ending` for every open choice of a request that nobody runs, and tells followers.
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

-- Since when Redis has been there without a break. Somebody looks every second; where nobody did, Redis was away (or no
-- scheduler lived), and followers could not say that they are there.
local function awake_ms(now_ms)
  local f = redis.call('HMGET', P .. ':meta', 'looked_ms', 'awake_ms')
  redis.call('HSET', P .. ':meta', 'looked_ms', int(now_ms))
  if f[1] and now_ms - tonumber(f[1]) < 3000 then return tonumber(f[2]) end
  redis.call('HSET', P .. ':meta', 'awake_ms', int(now_ms))
  return now_ms
end

-- Until when somebody follows a request; math.huge if nobody is asked for.
local function followed_until(fol_until, awake, grace_ms)
  if tonumber(fol_until or 0) == 0 then return math.huge end
  return math.max(tonumber(fol_until), awake + grace_ms)
end

-- Until when (ms) a waiting request may wait, and the ending that it gets then. math.huge if for ever.
local function may_wait_until(rid, awake, close)
  local f = redis.call('HMGET', request(rid), 'cancel', 'fol_until', 'arrived_ms', 'timeout_ms', 'queue_timeout_ms',
    'taken_ms', 'first_token_timeout_ms', 'first_token_ms')
  if f[1] == '1' then return 0, close.cancelled end
  local moment, ending = followed_until(f[2], awake, close.grace_ms), close.cancelled
  local function within(ms, what)
    if tonumber(ms) > 0 and f[3] + ms < moment then moment, ending = f[3] + ms, what end
  end
  within(f[4], close.total)
  if f[6] == '0' then within(f[5], close.queue) end
  if not f[8] then within(f[7], close.first_token) end
  return moment, ending
end

-- Waiting

-- Puts a request at its rank among the waiting. A tenant that comes back starts no lower than the lowest active one.
local function enqueue(rid, prio, tenant, rank, close)
  local tenants, rested = P .. ':tenants:' .. prio, P .. ':rested:' .. prio
  if not redis.call('ZSCORE', tenants, tenant) then
    local floor = floor_of(prio)
    local counter = tonumber(redis.call('ZSCORE', rested, tenant) or floor)
    redis.call('ZREM', rested, tenant)
    redis.call('ZADD', tenants, math.max(floor, counter), tenant)
  end
  redis.call('ZADD', P .. ':w:' .. prio .. ':' .. tenant, rank, rid)
  local moment = may_wait_until(rid, 0, close)
  if moment < math.huge then redis.call('ZADD', P .. ':due', moment, rid) end
  redis.call('PUBLISH', P .. ':ctl', 'q')
end

local function dequeue(rid)
  local f = redis.call('HMGET', request(rid), 'prio', 'tenant')
  local waiting, tenants = P .. ':w:' .. f[1] .. ':' .. f[2], P .. ':tenants:' .. f[1]
  redis.call('ZREM', waiting, rid)
  redis.call('ZREM', P .. ':due', rid)
  if redis.call('EXISTS', waiting) == 1 then return end
  local counter = redis.call('ZSCORE', tenants, f[2])
  if counter then
    redis.call('ZREM', tenants, f[2])
    redis.call('ZADD', P .. ':rested:' .. f[1], counter, f[2])
  end
end

-- Ends a waiting request if its time is up. Returns whether it did.
local function end_if_due(rid, now_ms, awake, close)
  local moment, ending = may_wait_until(rid, awake, close)
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
  end_if_due(rid, now_ms, awake_ms(now_ms), close)
end

-- The words of a request, as `admit` and `restore` get them from argument `i` on.
local function request_at(i)
  return {rid = ARGV[i], spec = ARGV[i + 1], head = ARGV[i + 2], prio = ARGV[i + 3], tenant = ARGV[i + 4],
    cost = ARGV[i + 5], n = ARGV[i + 6], prompt_tokens = ARGV[i + 7], stride = ARGV[i + 8], media_cost = ARGV[i + 9],
    timeout_ms = ARGV[i + 10], queue_timeout_ms = ARGV[i + 11], first_token_timeout_ms = ARGV[i + 12],
    idem = ARGV[i + 13], fingerprint = ARGV[i + 14], follow_ms = tonumber(ARGV[i + 15])}
end

-- Writes a request as one that waits, without a place in the queue yet.
local function create(q, now_ms, arrived_ms, rank)
  local fol_until = q.follow_ms > 0 and now_ms + q.follow_ms or 0
  redis.call('HSET', request(q.rid), 'spec', q.spec, 'head', q.head, 'state', 'queued', 'owner', '', 'own_at', 0,
    'cancel', 0, 'arrived_ms', int(arrived_ms), 'rank', int(rank), 'prio', q.prio, 'tenant', q.tenant, 'cost', q.cost,
    'n', q.n, 'open', q.n, 'prompt_tokens', q.prompt_tokens, 'stride', q.stride, 'media_cost', q.media_cost,
    'timeout_ms', q.timeout_ms, 'queue_timeout_ms', q.queue_timeout_ms, 'first_token_timeout_ms',
    q.first_token_timeout_ms, 'fol_until', int(fol_until), 'taken_ms', 0, 'attempts', 0,
     'charged', 0, 'idem', q.idem)
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
