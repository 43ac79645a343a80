-- Records where an engine listens, or, without a URL, that it has left the run for good.
-- Request: engine, url (or none).   Reply: 1
if request.url then
  redis.call('HSET', key('engine_urls'), request.engine, request.url)
else
  redis.call('HDEL', key('engine_urls'), request.engine)
end
wake('engines')
return 1
