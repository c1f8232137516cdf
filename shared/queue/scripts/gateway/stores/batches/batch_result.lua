-- Keeps the result of one line, which has only one. ARGV: id, line, 'completed' or 'failed', result
-- Returns 1, or 0 where it has one, or where no more are taken
local record, results = stored(ARGV[1]), stored(ARGV[1]) .. ':results'
if not redis.call('ZSCORE', open_batches, ARGV[1]) or redis.call('HEXISTS', record, 'outcome') == 1 then return 0 end
local value = string.sub(ARGV[3], 1, 1) .. ARGV[4]
if redis.call('HSETNX', results, ARGV[2], value) == 0 then return 0 end
count_stored(ARGV[1], #ARGV[2] + #value)
redis.call('HINCRBY', record, ARGV[3], 1)
return 1
