-- A scheduler's orderly end, after give_back: what it still owns goes back too. ARGV: closing (6), sid
local close, sid = closing(), ARGV[7]
local rids = redis.call('SMEMBERS', P .. ':own:' .. sid)
table.sort(rids)
for _, rid in ipairs(rids) do put_back(rid, close) end
redis.call('ZREM', P .. ':scheds', sid)
redis.call('HDEL', P .. ':load', sid)
redis.call('HDEL', P .. ':served', sid)
redis.call('DEL', P .. ':own:' .. sid)
redis.call('PUBLISH', P .. ':ctl', 'q')
return 1
