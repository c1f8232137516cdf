-- Pops the fairest waiting requests and makes the caller their owner.
-- ARGV: closing (6), sid, max requests, max tokens (of prompts, media and expected outputs; the first is taken anyway)
-- Returns {'RECOVERING'} | {'GONE'}
--   | {'OK', {spec, own_at, arrived_ms, {log0, e0, log1, e1, ...}, prio, prompt log, rank, attempts,
--     decoders lost with it}, ...}
local close, sid, requests_left, tokens_left = closing(), ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])
if redis.call('EXISTS', P .. ':recovery') == 1 then return {'RECOVERING'} end
if not redis.call('ZSCORE', P .. ':scheds', sid) then return {'GONE'} end
local now = now_us()
local now_ms = math.floor(now / 1000)
local up_since = up_since_ms(now_ms)
local mean_output = tonumber(redis.call('HGET', P .. ':meta', 'mean_output') or math.huge)
local takes = tonumber(redis.call('HGET', P .. ':meta', 'takes') or 0)
local taken = {'OK'}

-- The tenant with waiting work that was served least; every tenth request is taken from batch work.
local function next_tenant()
  local first, second = 'interactive', 'batch'
  if takes % 10 == 9 then first, second = second, first end
  for _, prio in ipairs({first, second}) do
    local tenant = redis.call('ZRANGE', P .. ':tenants:' .. prio, 0, 0, 'WITHSCORES')
    if tenant[1] then return prio, tenant[1], tenant[2] end
  end
end

local function expected_tokens(rid)
  local f = redis.call('HMGET', request(rid), 'cost', 'prompt_tokens', 'media_cost')
  return f[2] + f[3] + math.min(f[1] - f[2], mean_output)
end

local function own(rid)
  local r = request(rid)
  local f = redis.call('HMGET', r, 'spec', 'arrived_ms', 'n', 'prio', 'rank', 'taken_ms', 'lost_decoders')
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
  return {f[1], int(now), f[2], logs, f[4], prompt_log, f[5], attempts, f[7] or '0'}
end

while requests_left > 0 do
  local prio, tenant, counter = next_tenant()
  if not prio then break end
  local waiting = P .. ':w:' .. prio .. ':' .. tenant
  local rid = redis.call('ZRANGE', waiting, 0, 0)[1]
  if not rid then
    redis.call('ZREM', P .. ':tenants:' .. prio, tenant)
  elseif redis.call('HGET', request(rid), 'state') ~= 'queued' then
    redis.call('ZREM', waiting, rid)  -- deleted by hand: it must not block the others
  elseif not end_if_due(rid, now_ms, up_since, close) then
    local tokens = expected_tokens(rid)
    if tokens > tokens_left and #taken > 1 then break end
    redis.call('HSET', P .. ':meta', 'floor:' .. prio, counter)
    charge(rid, tokens)
    dequeue(rid)
    taken[#taken + 1] = own(rid)
    requests_left = requests_left - 1
    tokens_left = tokens_left - tokens
    takes = takes + 1
  end
end
if #taken > 1 then redis.call('HSET', P .. ':meta', 'takes', takes) end
return taken
