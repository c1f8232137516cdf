-- Ends a waiting request there and then; flags a running one for its owner. Reading another tenant's is not found.
-- ARGV: closing (6), rid, tenant, '1' to leave it to another gateway that has joined
-- Returns 'UNKNOWN' | 'ENDED' | 'CANCELLED' | 'FLAGGED' | 'FOLLOWED'
local close, rid = closing(), ARGV[7]
local r = request(rid)
local f = redis.call('HMGET', r, 'state', 'tenant')
if not f[1] or f[2] ~= ARGV[8] then return 'UNKNOWN' end
if f[1] == 'ended' then return 'ENDED' end
if ARGV[9] == '1' and redis.call('HGET', r, 'joined') then return 'FOLLOWED' end
redis.call('HSET', r, 'cancel', 1)
if f[1] == 'queued' then
  dequeue(rid)
  end_all(rid, close.cancelled, close.keep_s)
  return 'CANCELLED'
end
redis.call('PUBLISH', P .. ':ctl', 'c' .. rid)
return 'FLAGGED'
