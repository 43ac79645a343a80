-- The set of ready groups. A group is ready at its gate version: that of its oldest trainable token, or
-- of its newest with on_stale=mask_tokens, where older tokens are masked instead.

local ARRIVALS = PREFIX .. 'arrivals'

local function gate_of(min_version, max_version)
  return finite(on_stale == 'mask_tokens' and max_version or min_version)
end

-- `places`: score in `ready`, id, score, id...; `seqs`: sequence number, id...
local function enter_ready(places, seqs)
  call_many('ZADD', READY, places)
  if selector == 'fifo' then call_many('ZADD', ARRIVALS, seqs) end
end

local function leave_ready(ids)
  call_many('ZREM', READY, ids)
  if selector == 'fifo' then call_many('ZREM', ARRIVALS, ids) end
end
