-- Makes a file of the pieces that have been written. May be called again. ARGV: id, tenant, ms that it is kept, field, value, ...
-- Returns 1, or 0 where its pieces are gone
local id, record = ARGV[1], stored(ARGV[1])
local now = now_us()
local now_ms = math.floor(now / 1000)
local size = redis.call('HGET', stored_sizes, id)
if not size then return 0 end
if redis.call('EXISTS', record) == 1 then return 1 end
local expires_ms = int(now_ms + tonumber(ARGV[3]))
redis.call('HSET', record, 'tenant', ARGV[2], 'bytes', size, 'created_ms', int(now_ms), 'expires_ms', expires_ms)
redis.call('HSET', record, unpack(ARGV, 4))
redis.call('ZADD', stored_of(id, ARGV[2]), int(now), id)
redis.call('ZADD', stored_expiry, expires_ms, id)
return 1
