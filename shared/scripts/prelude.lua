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

-- The request has no open choice left: it leaves the counters and lives on for late readers only.
local function retire(rid, keep_s)
  local r = request(rid)
  local n = tonumber(redis.call('HGET', r, 'n'))
  local owner = redis.call('HGET', r, 'owner')
  if owner and owner ~= '' then redis.call('SREM', P .. ':own:' .. owner, rid) end
  redis.call('HSET', r, 'state', 'ended', 'owner', '')
  redis.call('HDEL', r, 'spec')
  forget_live(rid)
  redis.call('EXPIRE', r, keep_s)
  redis.call('EXPIRE', P .. ':l:' .. rid .. ':p', keep_s)
  for c = 0, n - 1 do redis.call('EXPIRE', P .. ':l:' .. rid .. ':' .. c, keep_s) end
  local idem = redis.call('HGET', r, 'idem')
  if idem and idem ~= '' then redis.call('EXPIRE', idem, keep_s) end
end

-- Writes `ending` for every open choice of a request that nobody runs, and tells followers.
local function end_all(rid, ending, keep_s)
  local r = request(rid)
  local n = tonumber(redis.call('HGET', r, 'n'))
  local events = {}
  for c = 0, n - 1 do
    if redis.call('HSETNX', r, 'e' .. c, ending) == 1 then
      events[#events + 1] = ending_event(rid, c, ending)
    end
  end
  redis.call('HSET', r, 'open', 0)
  local idem = redis.call('HGET', r, 'idem')
  if idem and idem ~= '' then redis.call('DEL', idem) end
  retire(rid, keep_s)
  redis.call('PUBLISH', P .. ':tok', table.concat(events))
end

-- Puts a request at its rank among the waiting. A tenant that comes back starts at the lowest active virtual time.
local function enqueue(rid, prio, tenant, rank)
  local tenants = P .. ':tenants:' .. prio
  redis.call('ZADD', P .. ':w:' .. prio .. ':' .. tenant, rank, rid)
  if not redis.call('ZSCORE', tenants, tenant) then
    local lowest = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
    redis.call('ZADD', tenants, lowest[2] or 0, tenant)
  end
end

local function dequeue(rid, prio, tenant)
  local waiting = P .. ':w:' .. prio .. ':' .. tenant
  redis.call('ZREM', waiting, rid)
  if redis.call('EXISTS', waiting) == 0 then redis.call('ZREM', P .. ':tenants:' .. prio, tenant) end
end

-- Takes a running request away from its owner and puts it back at the head; a cancelled one ends instead.
local function put_back(rid, cancelled, keep_s)
  local r = request(rid)
  local f = redis.call('HMGET', r, 'state', 'owner', 'prio', 'tenant', 'rank', 'cancel')
  if f[1] ~= 'running' then return end
  redis.call('SREM', P .. ':own:' .. f[2], rid)
  redis.call('HSET', r, 'state', 'queued', 'owner', '')
  if f[6] == '1' then
    end_all(rid, cancelled, keep_s)
  else
    enqueue(rid, f[3], f[4], f[5])
    redis.call('PUBLISH', P .. ':ctl', 'q')
  end
end
