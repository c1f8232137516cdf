-- Gives a reservation back: preparing failed, or the client left before admission. ARGV: rid, idem key or ''
redis.call('ZREM', P .. ':resv', ARGV[1])
if redis.call('EXISTS', request(ARGV[1])) == 0 then
  forget_live(ARGV[1])
  if ARGV[2] ~= '' and redis.call('HGET', ARGV[2], 'rid') == ARGV[1] then redis.call('DEL', ARGV[2]) end
end
return 1
