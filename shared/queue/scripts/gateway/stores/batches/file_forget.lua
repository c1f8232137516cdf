-- Removes a file, or what has been written of one. ARGV: id, tenant
-- Returns 'DONE' | 'GONE' | 'USED': a batch that has not ended reads it
local found = redis.call('HMGET', stored(ARGV[1]), 'tenant', 'readers')
if redis.call('HEXISTS', stored_sizes, ARGV[1]) == 0 or (found[1] and found[1] ~= ARGV[2]) then return 'GONE' end
if tonumber(found[2] or 0) > 0 then return 'USED' end
drop_stored(ARGV[1])
return 'DONE'
