-- Notes what became of an adapter at a decoder. ARGV: digest, decoder, why it could not be loaded ('' is loaded)
local key = P .. ':adapter:' .. ARGV[1]
redis.call('HSET', key, ARGV[2], ARGV[3])
redis.call('PEXPIRE', key, 600000)
return 1
