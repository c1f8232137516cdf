-- Run first on every connection: finds out whether Redis has restarted and may have lost its last writes. Then nothing
-- is taken, fenced or leased for a while, so that schedulers and gateways can put back what they know.
-- ARGV: the run that this process knew, or '', recovery ms.  Returns the run's id
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local meta = redis.call('HMGET', P .. ':meta', 'run_id', 'recovered_run')
local function is_other(known) return known and known ~= '' and known ~= run_id end
if meta[1] ~= run_id then redis.call('HSET', P .. ':meta', 'run_id', run_id) end
-- Where everything was lost, only a process that knew another run can tell that there was one.
if meta[2] ~= run_id and (is_other(meta[1]) or is_other(ARGV[1])) then
  redis.call('HSET', P .. ':meta', 'recovered_run', run_id, 'up_since_ms', int(math.floor(now_us() / 1000)))
  redis.call('SET', P .. ':recovery', run_id, 'PX', ARGV[2])
end
return run_id
