-- Writes the state of a batch for the gateway that leads it. One that is being cancelled stays so until it has ended.
-- ARGV: id, gateway, status, field, value, ...
-- Returns 1, or 0 where the gateway does not lead it any more
local id, status, record = ARGV[1], ARGV[3], stored(ARGV[1])
if not leads(id, ARGV[2]) then return 0 end
local is_end = status ~= 'in_progress' and status ~= 'finalizing'
if is_end or redis.call('HGET', record, 'status') ~= 'cancelling' then
  redis.call('HSET', record, 'status', status, status .. '_ms', int(math.floor(now_us() / 1000)))
end
if #ARGV > 3 then
  local size = 0
  for i = 4, #ARGV do size = size + #ARGV[i] end
  redis.call('HSET', record, unpack(ARGV, 4))
  count_stored(id, size)
end
if is_end then
  redis.call('ZREM', open_batches, id)
  redis.call('HDEL', record, 'leader')
  local file = stored(redis.call('HGET', record, 'input'))
  if redis.call('EXISTS', file) == 1 then redis.call('HINCRBY', file, 'readers', -1) end
end
return 1
