-- Records where an engine listens, or, with an empty URL, that it has left the run for good.
-- ARGV: engine, URL or ''.   Reply: 1
if ARGV[2] == '' then
  redis.call('HDEL', key('engine_urls'), ARGV[1])
else
  redis.call('HSET', key('engine_urls'), ARGV[1], ARGV[2])
end
wake('engines')
return 1
