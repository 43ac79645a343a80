-- Keeps tokens with a prompt that will run again, as a checkpoint's dump has them.
-- Request: prompt ('index task').   Reply: 1
-- Further arguments: for each part its name and its tokens.
redis.call('HSET', KEPT, request.prompt, '1')
redis.call('HSET', kept_key(request.prompt), unpack(ARGV, 2))
return 1
