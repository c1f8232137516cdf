-- Accepts a batch, which a gateway will lead. Its file is kept for as long as it may take.
-- ARGV: id, tenant, id of the file, ms that it may take, ms that it is kept beyond, most open batches, limit of the bytes
--   of all files and batches, field, value, ...
-- Returns 'MADE' | 'GONE': there is no such file | 'MANY' | 'FULL'
local id, tenant, file = ARGV[1], ARGV[2], stored(ARGV[3])
local now = now_us()
local now_ms = math.floor(now / 1000)
drop_expired(now_ms)
if redis.call('HGET', file, 'tenant') ~= tenant then return 'GONE' end
if redis.call('ZCARD', open_batches) >= tonumber(ARGV[6]) then return 'MANY' end
local size = 1024
for i = 8, #ARGV do size = size + #ARGV[i] end
if not has_room(size, ARGV[7]) then return 'FULL' end
local expires_ms = now_ms + tonumber(ARGV[4])
local dropped_ms = expires_ms + tonumber(ARGV[5])
redis.call('HSET', stored(id), 'tenant', tenant, 'input', ARGV[3], 'status', 'validating', 'created_ms', int(now_ms),
  'expires_ms', int(expires_ms), 'dropped_ms', int(dropped_ms), unpack(ARGV, 8))
count_stored(id, size)
redis.call('ZADD', stored_of(id, tenant), int(now), id)
redis.call('ZADD', stored_expiry, int(dropped_ms), id)
redis.call('ZADD', open_batches, 0, id)
redis.call('HINCRBY', file, 'readers', 1)
if tonumber(redis.call('HGET', file, 'expires_ms')) < dropped_ms then
  redis.call('HSET', file, 'expires_ms', int(dropped_ms))
  redis.call('ZADD', stored_expiry, int(dropped_ms), ARGV[3])
end
return 'MADE'
