-- Reserves a request's cost before any media work, or refuses.
-- ARGV: rid, cost (upper bound in tokens), max requests, max tokens, reservation ms, idem key or '', fingerprint, keep s,
--   prio, tenant, queue timeout ms, first token timeout ms
-- Returns {'OK'} | {'FULL', which, retry after s} | {'LATE', which timeout, s that it may take, retry after s} | {'EXISTS', rid}
--   | {'CONFLICT', rid}
local rid, cost, idem = ARGV[1], tonumber(ARGV[2]), ARGV[6]
local now_ms = math.floor(now_us() / 1000)
free_late_reservations(now_ms)
if idem ~= '' then
  local known = redis.call('HMGET', idem, 'rid', 'fingerprint')
  if known[1] and redis.call('HEXISTS', P .. ':live', known[1]) + redis.call('EXISTS', request(known[1])) > 0 then
    -- A key that came back without its body's digest, after Redis had lost it, goes with every body.
    if known[2] ~= '' and known[2] ~= ARGV[7] then return {'CONFLICT', known[1]} end
    return {'EXISTS', known[1]}
  end
end
local live = redis.call('HLEN', P .. ':live')
local tokens = tonumber(redis.call('HGET', P .. ':meta', 'live_tokens') or 0)
local rate = math.max(1, tonumber(redis.call('HGET', P .. ':meta', 'tokens_per_s') or 100))
if live >= tonumber(ARGV[3]) then
  return {'FULL', 'requests', math.max(1, math.ceil(tokens / math.max(1, live) / rate))}
end
local over = tokens + cost - tonumber(ARGV[4])
-- A request larger than the whole limit may still run alone.
if over > 0 and tokens > 0 then return {'FULL', 'tokens', math.max(1, math.ceil(over / rate))} end
local late, takes, excess = too_late(ARGV[9], ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]))
if late then
  return {'LATE', late, math.ceil(takes / 1000), math.max(1, math.ceil(excess / 1000))}
end
begin_turn(now_ms)
set_live(rid, cost)
redis.call('ZADD', P .. ':resv', now_ms + tonumber(ARGV[5]), rid)
if idem ~= '' then
  redis.call('HSET', idem, 'rid', rid, 'fingerprint', ARGV[7])
  redis.call('EXPIRE', idem, ARGV[8])
end
return {'OK'}
