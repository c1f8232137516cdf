-- Removes what is kept of a response. ARGV: rid
local size = redis.call('HGET', P .. ':responses:sizes', ARGV[1])
if not size then return 0 end
redis.call('DECRBY', P .. ':responses:total', size)
redis.call('DEL', P .. ':response:' .. ARGV[1])
redis.call('ZREM', P .. ':responses:expiry', ARGV[1])
redis.call('HDEL', P .. ':responses:sizes', ARGV[1])
redis.call('ZREM', P .. ':responses:open', ARGV[1])
return 1
