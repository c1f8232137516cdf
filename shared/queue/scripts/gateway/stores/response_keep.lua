-- Keeps fields of a response, each of which is written once, and renews it. Where there is no room for them, the responses
-- that were used longest ago go.
-- ARGV: rid, ms that it is kept from now on, limit of the bytes of all, 1 where it must be there already, field, value, ...
-- Returns {'OK', rids of those that went ...} | {'LARGE'}: it alone exceeds the limit | {'GONE'}: it is not there
local rid, limit = ARGV[1], tonumber(ARGV[3])
local record = P .. ':response:' .. rid
local expiry, sizes, total_key = P .. ':responses:expiry', P .. ':responses:sizes', P .. ':responses:total'
local open = P .. ':responses:open'
local now_ms = math.floor(now_us() / 1000)

local function drop(gone)
  redis.call('DECRBY', total_key, redis.call('HGET', sizes, gone))
  redis.call('DEL', P .. ':response:' .. gone)
  redis.call('ZREM', expiry, gone)
  redis.call('HDEL', sizes, gone)
  redis.call('ZREM', open, gone)
end

for _, gone in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', now_ms, 'LIMIT', 0, 1000)) do drop(gone) end
if ARGV[4] == '1' and redis.call('EXISTS', record) == 0 then return {'GONE'} end
local size, fresh = 0, {}
for i = 5, #ARGV, 2 do
  if redis.call('HEXISTS', record, ARGV[i]) == 0 then
    size = size + #ARGV[i] + #ARGV[i + 1]
    fresh[#fresh + 1] = ARGV[i]
    fresh[#fresh + 1] = ARGV[i + 1]
  end
end
if tonumber(redis.call('HGET', sizes, rid) or 0) + size > limit then return {'LARGE'} end
local answer = {'OK'}
redis.call('ZADD', expiry, now_ms + tonumber(ARGV[2]), rid)
while tonumber(redis.call('GET', total_key) or 0) + size > limit do
  local first = redis.call('ZRANGE', expiry, 0, 1)
  local gone = first[1] == rid and first[2] or first[1]
  drop(gone)
  answer[#answer + 1] = gone
end
if #fresh > 0 then
  redis.call('HSET', record, unpack(fresh))
  redis.call('HINCRBY', sizes, rid, size)
  redis.call('INCRBY', total_key, size)
end
redis.call('PEXPIRE', record, ARGV[2])
if redis.call('HEXISTS', record, 'response') == 1 then
  redis.call('ZREM', open, rid)
elseif not redis.call('ZSCORE', open, rid) then
  redis.call('ZADD', open, now_ms, rid)
end
return answer
