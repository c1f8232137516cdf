-- Ends a waiting request there and then; flags a running one for its owner. Reading another tenant's is not found.
-- ARGV: rid, tenant, cancelled ending, keep s.  Returns 'UNKNOWN' | 'ENDED' | 'CANCELLED' | 'FLAGGED'
local rid = ARGV[1]
local r = request(rid)
local f = redis.call('HMGET', r, 'state', 'tenant', 'prio')
if not f[1] or f[2] ~= ARGV[2] then return 'UNKNOWN' end
if f[1] == 'ended' then return 'ENDED' end
redis.call('HSET', r, 'cancel', 1)
if f[1] == 'queued' then
  dequeue(rid, f[3], f[2])
  end_all(rid, ARGV[3], ARGV[4])
  return 'CANCELLED'
end
redis.call('PUBLISH', P .. ':ctl', 'c' .. rid)
return 'FLAGGED'
