-- Says that a second gateway follows a request: the first one's client does not take it along when it leaves. ARGV: rid
if redis.call('EXISTS', request(ARGV[1])) == 1 then redis.call('HSET', request(ARGV[1]), 'joined', 1) end
return 1
