-- Renews a gateway's leases on batches, and takes those that nobody leads.
-- ARGV: gateway, ms of a lease, most batches that it leads, id of a batch that it leads, ...
-- Returns {bytes of all files and batches, id, status, ...} of those that it leads now
local gateway = ARGV[1]
local now_ms = math.floor(now_us() / 1000)
local until_ms = now_ms + tonumber(ARGV[2])
drop_expired(now_ms)
local answer = {tonumber(redis.call('GET', stored_total) or 0)}
local function lead(id)
  redis.call('ZADD', open_batches, until_ms, id)
  answer[#answer + 1] = id
  answer[#answer + 1] = redis.call('HGET', stored(id), 'status')
end
for i = 4, #ARGV do
  if leads(ARGV[i], gateway) then lead(ARGV[i]) end
end
local more = tonumber(ARGV[3]) - (#answer - 1) / 2
-- After a restart of Redis those who lead are given time to say so.
if more <= 0 or redis.call('EXISTS', P .. ':recovery') == 1 then return answer end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', open_batches, '-inf', now_ms, 'LIMIT', 0, more)) do
  redis.call('HSET', stored(id), 'leader', gateway)
  lead(id)
end
return answer
