-- Removes a batch that has ended, and files that it has for itself. ARGV: id, tenant, id of a file, ...
-- Returns 'done' | 'gone' | 'open': it has not ended
if redis.call('HGET', stored(ARGV[1]), 'tenant') ~= ARGV[2] then return 'gone' end
if redis.call('ZSCORE', open_batches, ARGV[1]) then return 'open' end
drop_stored(ARGV[1])
for i = 3, #ARGV do drop_stored(ARGV[i]) end
return 'done'
