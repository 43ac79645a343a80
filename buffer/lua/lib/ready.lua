-- The set of ready groups. A group is ready at its gate version: that of its oldest trainable token, or
-- of its newest with on_stale=mask_tokens, where older tokens are masked instead.

local ORDER = PREFIX .. 'order' -- the same groups in the order of the selector, if `ready` is not in it
local has_order = selector == 'fifo' or selector == 'shortest'
local TIE_RANGE = 1048576 -- 2^20: of equally short groups the first to arrive comes first

local function gate_of(min_version, max_version)
  return finite(on_stale == 'mask_tokens' and max_version or min_version)
end

-- A group's score in `order`.
local function order_of(seq, trainable)
  if selector == 'fifo' then return whole(seq) end
  return whole(trainable * TIE_RANGE + seq % TIE_RANGE)
end

-- `places`: score in `ready`, id, score, id...; `orders`: score in `order`, id...
local function enter_ready(places, orders)
  call_many('ZADD', READY, places)
  if has_order then call_many('ZADD', ORDER, orders) end
end

local function leave_ready(ids)
  call_many('ZREM', READY, ids)
  if has_order then call_many('ZREM', ORDER, ids) end
end
