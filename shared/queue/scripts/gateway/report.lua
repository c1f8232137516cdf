-- Makes one gateway the one that reports the system's metrics, and numbers the decoders for it (`engine` in metrics).
-- ARGV: gateway, ttl ms (0: it reports no more), decoder id ...
-- Returns {'NO'} while another one reports | {'YES', number of the first decoder, of the second, ...}
local reporter, engines = P .. ':reporter', P .. ':engines'
local who = redis.call('GET', reporter)
if who and who ~= ARGV[1] then return {'NO'} end
if ARGV[2] == '0' then
  redis.call('DEL', reporter)
  return {'NO'}
end
redis.call('SET', reporter, ARGV[1], 'PX', ARGV[2])
-- A decoder keeps its number; a new one gets the smallest that is free.
local present, taken = {}, {}
for i = 3, #ARGV do present[ARGV[i]] = true end
local known = redis.call('HGETALL', engines)
for i = 1, #known, 2 do
  if present[known[i]] then
    taken[known[i + 1]] = true
  else
    redis.call('HDEL', engines, known[i])
  end
end
local answer, free = {'YES'}, 0
for i = 3, #ARGV do
  local number = redis.call('HGET', engines, ARGV[i])
  if not number then
    while taken[tostring(free)] do free = free + 1 end
    number = tostring(free)
    taken[number] = true
    redis.call('HSET', engines, ARGV[i], number)
  end
  answer[#answer + 1] = number
end
return answer
