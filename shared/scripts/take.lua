-- Pops the fairest waiting requests and makes the caller their owner.
-- ARGV: sid, max requests, max tokens, cancelled ending, expired ending, keep s
-- Returns {'HOLD'} | {'GONE'} | {'OK', {rid, spec, own_at, arrived_ms, {log0, e0, log1, e1, ...}, prio, prompt log}, ...}
local sid, room_requests, room_tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if redis.call('EXISTS', P .. ':hold') == 1 then return {'HOLD'} end
if not redis.call('ZSCORE', P .. ':scheds', sid) then return {'GONE'} end
local now = now_us()
local taken = {'OK'}

local function next_tenant()
  local turn = redis.call('HINCRBY', P .. ':meta', 'takes', 1)
  local first, second = 'interactive', 'batch'
  if turn % 10 == 0 then first, second = second, first end
  for _, prio in ipairs({first, second}) do
    local tenant = redis.call('ZRANGE', P .. ':tenants:' .. prio, 0, 0)[1]
    if tenant then return prio, tenant end
  end
end

while room_requests > 0 do
  local prio, tenant = next_tenant()
  if not prio then break end
  local waiting = P .. ':w:' .. prio .. ':' .. tenant
  local rid = redis.call('ZRANGE', waiting, 0, 0)[1]
  if not rid then
    redis.call('ZREM', P .. ':tenants:' .. prio, tenant)
  else
    local r = request(rid)
    local f = redis.call('HMGET', r, 'state', 'cancel', 'arrived_ms', 'timeout_ms', 'cost', 'n', 'spec')
    local timeout = tonumber(f[4] or 0)
    if f[1] ~= 'queued' then
      dequeue(rid, prio, tenant)
    elseif f[2] == '1' then
      dequeue(rid, prio, tenant)
      end_all(rid, ARGV[4], ARGV[6])
    elseif timeout > 0 and now / 1000 > tonumber(f[3]) + timeout then
      dequeue(rid, prio, tenant)
      end_all(rid, ARGV[5], ARGV[6])
    else
      local cost = tonumber(f[5])
      if cost > room_tokens and #taken > 1 then break end
      redis.call('ZINCRBY', P .. ':tenants:' .. prio, cost, tenant)
      dequeue(rid, prio, tenant)
      redis.call('HSET', r, 'state', 'running', 'owner', sid, 'own_at', int(now))
      redis.call('SADD', P .. ':own:' .. sid, rid)
      local logs = {}
      for c = 0, tonumber(f[6]) - 1 do
        logs[#logs + 1] = redis.call('GET', P .. ':l:' .. rid .. ':' .. c) or ''
        logs[#logs + 1] = redis.call('HGET', r, 'e' .. c) or ''
      end
      local prompt_log = redis.call('GET', P .. ':l:' .. rid .. ':p') or ''
      taken[#taken + 1] = {rid, f[7], int(now), f[3], logs, prio, prompt_log}
      room_requests = room_requests - 1
      room_tokens = room_tokens - cost
    end
  end
end
return taken
