-- Stands before every script. KEYS[1] is the model's prefix "t:{m}"; all other keys share its hash tag, so they are in
-- its slot. See shared/queue/keys.py for the legend.
local P = KEYS[1]

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- Lua numbers print with 14 digits, microseconds have 16.
local function int(n) return string.format('%.0f', n) end

local function request(rid) return P .. ':r:' .. rid end

local function log_of(rid, c) return P .. ':l:' .. rid .. ':' .. c end

-- Keeps what the first record of a request was computed with and in ('' is not known), and whether its logs need not be
-- those of an undisturbed run (1).
local function note_origin(rid, content, numerics, inexact)
  if content ~= '' then redis.call('HSETNX', request(rid), 'content', content) end
  if numerics ~= '' then redis.call('HSETNX', request(rid), 'numerics', numerics) end
  if inexact == 1 then redis.call('HSET', request(rid), 'inexact', 1) end
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

-- What is counted against the limits

local function forget_live(rid)
  local cost = redis.call('HGET', P .. ':live', rid)
  if cost then
    redis.call('HDEL', P .. ':live', rid)
    redis.call('HINCRBY', P .. ':meta', 'live_tokens', -tonumber(cost))
  end
  -- Asked first: a script that has written, even nothing, is not refused any more where memory is full.
  if redis.call('SISMEMBER', P .. ':begun', rid) == 1 then redis.call('SREM', P .. ':begun', rid) end
end

local function set_live(rid, cost)
  forget_live(rid)
  redis.call('HSET', P .. ':live', rid, cost)
  redis.call('HINCRBY', P .. ':meta', 'live_tokens', cost)
end

-- Fairness: each tenant has a counter of the tokens served to it, and the lowest is served first

-- Brings what its tenant has been charged for a request to `tokens`.
local function charge(rid, tokens)
  local f = redis.call('HMGET', request(rid), 'charged', 'tenant', 'prio')
  local more = tokens - tonumber(f[1] or 0)
  if more == 0 then return end
  redis.call('HSET', request(rid), 'charged', tokens)
  more = more / tonumber(redis.call('HGET', P .. ':weights', f[2]) or 1)
  if not redis.call('ZADD', P .. ':tenants:' .. f[3], 'XX', 'INCR', more, f[2]) then
    redis.call('ZADD', P .. ':idle:' .. f[3], 'XX', 'INCR', more, f[2])
  end
end

-- Endings

-- Whether a serialized Ending says "stop" or "length": its first field is the reason.
local function is_finish(ending)
  local tag, reason = string.byte(ending or '', 1, 2)
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
