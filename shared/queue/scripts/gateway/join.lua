-- Says that a second gateway follows a request: it is not cancelled when the first one's client leaves. ARGV: rid
if redis.call('EXISTS', request(ARGV[1])) == 1 then redis.call('HSET', request(ARGV[1]), 'joined', 1) end
return 1
