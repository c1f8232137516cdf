-- A scheduler's orderly end, after give_back. ARGV: sid
redis.call('ZREM', P .. ':scheds', ARGV[1])
redis.call('HDEL', P .. ':load', ARGV[1])
redis.call('DEL', P .. ':own:' .. ARGV[1])
redis.call('PUBLISH', P .. ':ctl', 'q')
return 1
