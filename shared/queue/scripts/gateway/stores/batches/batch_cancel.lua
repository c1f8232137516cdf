-- Asks for the end of a batch, which whoever leads it brings about. ARGV: id, tenant
-- Returns 'GONE' | its status from now on
local record = stored(ARGV[1])
local found = redis.call('HMGET', record, 'tenant', 'status', 'outcome')
if found[1] ~= ARGV[2] then return 'GONE' end
if (found[2] == 'validating' or found[2] == 'in_progress') and not found[3] then
  redis.call('HSET', record, 'status', 'cancelling', 'cancelling_ms', int(math.floor(now_us() / 1000)))
  return 'cancelling'
end
return found[2]
