-- Accepts a prepared request: its reservation becomes its exact cost, and it waits. Cannot fail on limits.
-- ARGV: rid, spec, head, prio, tenant, cost, n, prompt tokens, timeout ms, priority (us to advance the rank), idem key
-- Returns the arrival in ms of Redis TIME
local rid, prio, tenant = ARGV[1], ARGV[4], ARGV[5]
local now = now_us()
local r = request(rid)
if redis.call('EXISTS', r) == 1 then return tonumber(redis.call('HGET', r, 'arrived_ms')) end
local rank = now - tonumber(ARGV[10])
redis.call('ZREM', P .. ':resv', rid)
set_live(rid, tonumber(ARGV[6]))
redis.call('HSET', r, 'spec', ARGV[2], 'head', ARGV[3], 'state', 'queued', 'owner', '', 'own_at', 0, 'cancel', 0,
  'arrived_ms', int(math.floor(now / 1000)), 'timeout_ms', ARGV[9], 'tenant', tenant, 'prio', prio, 'rank', int(rank),
  'cost', ARGV[6], 'n', ARGV[7], 'open', ARGV[7], 'prompt_tokens', ARGV[8], 'idem', ARGV[11])
enqueue(rid, prio, tenant, int(rank))
redis.call('PUBLISH', P .. ':ctl', 'q')
return math.floor(now / 1000)
