-- Renews a scheduler's lease and publishes its load. ARGV: sid, ttl ms, 1 to register, load, tokens per s or '', contents
-- (hex) of the decoders that it has bound, with blanks between them
-- Returns {'GONE'} | {'OK', now ms, sid, deadline, ...} with all other schedulers
local sid = ARGV[1]
local now_ms = math.floor(now_us() / 1000)
local scheds = P .. ':scheds'
local may_enter = ARGV[3] == '1' or redis.call('EXISTS', P .. ':recovery') == 1
if not may_enter and not redis.call('ZSCORE', scheds, sid) then return {'GONE'} end
redis.call('ZADD', scheds, now_ms + tonumber(ARGV[2]), sid)
redis.call('HSET', P .. ':load', sid, ARGV[4])
redis.call('HSET', P .. ':served', sid, ARGV[6])
if ARGV[5] ~= '' then redis.call('HSET', P .. ':meta', 'tokens_per_s', ARGV[5]) end
local answer = {'OK', int(now_ms)}
local all = redis.call('ZRANGE', scheds, 0, -1, 'WITHSCORES')
for i = 1, #all, 2 do
  if all[i] ~= sid then
    answer[#answer + 1] = all[i]
    answer[#answer + 1] = all[i + 1]
  end
end
return answer
