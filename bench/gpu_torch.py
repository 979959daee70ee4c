#!/usr/bin/env python3
"""What PyTorch makes of the base alone, for the rows of bench_gpu_model that have no variants: the shape of Llama-3.1-8B, random bf16
weights, one GPU.

    bench/gpu_torch.py [--seconds 100] [--shape 8b|tiny] [--device cuda|cpu]      needs torch; transformers for two of the ways

Ways:
  transformers         LlamaForCausalLM as it is, SDPA, StaticCache; decode steps captured as a CUDA graph by hand
  transformers-compile the same with torch.compile(fullgraph, reduce-overhead), which is what its documentation advises
  compiled             a layer written for speed: q, k, v and gate, up as one product each, flash attention over exactly the context
                       (the query heads of a key head as rows, so that nothing is repeated), torch.compile, the step as a CUDA graph
  compiled-autotune    the same with max-autotune, which chooses among generated kernels and cuBLAS
Decode: one token each of `batch` sequences with 512 in the cache; prefill: one prompt, logits of its last token. All greedy. Wall
clock from a step's launch to its tokens on the host, median of 15. The quickest to make come first, each has what is left of the time,
and rows come out as they are measured: what,model,dtype,way,batch,context,us,tokens_per_s. On the CPU nothing is captured or
compiled: a check that all ways give the same logits."""
import argparse
import gc
import signal
import statistics
import sys
import time

import torch
import torch.nn.functional as F

options = argparse.ArgumentParser()
options.add_argument("--seconds", type=float, default=100)
options.add_argument("--shape", choices=["8b", "tiny"], default="8b")
options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
options = options.parse_args()
begin = time.monotonic()
device, cuda = options.device, options.device == "cuda"
CONTEXT, BATCHES, PROMPTS, REPEATS = (512, (1, 16, 64, 256), (512, 2048), 15) if options.shape == "8b" else (24, (1, 3), (20,), 2)
HIDDEN, LAYERS, HEADS, KV, DIM, FFN, VOCAB = (4096, 32, 32, 8, 128, 14336, 128256) if options.shape == "8b" else (256, 2, 8, 2, 32, 512, 1000)
dtype = torch.bfloat16 if cuda else torch.float32
MAX = CONTEXT + 64  # of a static cache: a captured step moves on by one each time
torch.set_grad_enabled(False)
if cuda:
    torch.cuda.set_device(0)


class OutOfTime(Exception):
    pass


def ring(*_):
    raise OutOfTime


def left():
    return options.seconds - (time.monotonic() - begin)


def attempt(way, needs, work):
    """Whether it ended: not where it would not, and not at any price."""
    if left() < needs:
        print(f"{way}: skipped, {left():.0f} s are left", file=sys.stderr, flush=True)
        return False
    started = time.monotonic()
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(1, left()))
    try:
        work()
    except OutOfTime:
        print(f"{way}: not done when the time was over", file=sys.stderr, flush=True)
        return False
    except Exception as fault:  # one way must not hide the others
        print(f"{way}: {type(fault).__name__}: {str(fault)[:400]}", file=sys.stderr, flush=True)
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print(f"{way}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    return True


def sync():
    if cuda:
        torch.cuda.synchronize()


def captured(step):
    """step, which writes into tensors of its own, as a CUDA graph."""
    if not cuda:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay():
        graph.replay()
        return out

    return replay


def timed(step, before=lambda: None):
    for _ in range(3):
        before()
        step().cpu()
    out = []
    for _ in range(REPEATS):
        before()
        sync()
        at = time.perf_counter()
        step().cpu()
        out.append(time.perf_counter() - at)
    return statistics.median(out)


def row(what, way, batch, context, seconds):
    tokens = batch if what == "decode" else batch * context
    print(f"{what},{options.shape},{str(dtype)[6:]},{way},{batch},{context},{seconds * 1e6:.0f},{tokens / seconds:.1f}", flush=True)


# ---- The weights, which all ways share ----

def matrix(*shape):
    return torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02)


torch.manual_seed(1)
embed, head = matrix(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN)
ones = torch.ones(HIDDEN, device=device, dtype=dtype)
layers = [(ones, matrix((HEADS + 2 * KV) * DIM, HIDDEN), matrix(HIDDEN, HEADS * DIM), ones, matrix(2 * FFN, HIDDEN), matrix(HIDDEN, FFN)) for _ in range(LAYERS)]
frequencies = 1.0 / 10000.0 ** (torch.arange(0, DIM, 2, device=device).float() / DIM)


def ids(batch, count):
    return torch.randint(0, VOCAB, (batch, count), device=device)


# ---- The layer written for speed ----

def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def layer(x, cos, sin, keys, values, before, norm, qkv, out, norm2, gate_up, down):
    """x: [batch, tokens, HIDDEN], tokens [before, before + tokens) of each sequence. keys, values: [batch, KV, MAX, DIM]."""
    batch, tokens, _ = x.shape
    h = F.linear(F.rms_norm(x, (HIDDEN,), norm, 1e-5), qkv).view(batch, tokens, HEADS + 2 * KV, DIM).transpose(1, 2)
    q, k, v = h.split((HEADS, KV, KV), 1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    keys[:, :, before:before + tokens] = k
    values[:, :, before:before + tokens] = v
    if tokens == 1:
        q = q.reshape(batch, KV, HEADS // KV, DIM)
        a = F.scaled_dot_product_attention(q, keys[:, :, :before + 1], values[:, :, :before + 1])
        a = a.reshape(batch, 1, HEADS * DIM)
    else:
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(batch, tokens, HEADS * DIM)
    x = x + F.linear(a, out)
    gate, up = F.linear(F.rms_norm(x, (HIDDEN,), norm2, 1e-5), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def forward(run_layer, tokens, before, caches):
    positions = torch.arange(before, before + tokens.shape[1], device=device).float()
    phase = torch.outer(positions, frequencies)
    phase = torch.cat((phase, phase), -1)
    cos, sin = phase.cos().to(dtype), phase.sin().to(dtype)
    x = F.embedding(tokens, embed)
    for (keys, values), weights in zip(caches, layers):
        x = run_layer(x, cos, sin, keys, values, before, *weights)
    return F.linear(F.rms_norm(x[:, -1], (HIDDEN,), ones, 1e-5), head)


def caches_for(batch, tokens):
    return [tuple(torch.randn(batch, KV, tokens, DIM, device=device, dtype=dtype) for _ in range(2)) for _ in range(LAYERS)]


def own(way, run_layer, batches, prompts):
    for batch in batches:
        tokens, caches = ids(batch, 1), caches_for(batch, CONTEXT + 8)
        row("decode", way, batch, CONTEXT + 1, timed(captured(lambda: forward(run_layer, tokens, CONTEXT, caches).argmax(-1))))
        del caches
        free()
    for count in prompts:
        tokens, caches = ids(1, count), caches_for(1, count)
        row("prefill", way, 1, count, timed(captured(lambda: forward(run_layer, tokens, 0, caches).argmax(-1))))


def free():
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


# ---- transformers ----

model = None


def open_transformers():
    global model
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=DIM, vocab_size=VOCAB,
                         max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="sdpa")
    with torch.device("meta"):
        made = LlamaForCausalLM(config).to(dtype).eval()

    def put(module, weight):
        module.weight = torch.nn.Parameter(weight, requires_grad=False)

    put(made.model.embed_tokens, embed)
    put(made.lm_head, head)
    put(made.model.norm, ones)
    for block, (norm, qkv, out, norm2, gate_up, down) in zip(made.model.layers, layers):
        q, k, v = qkv.split((HEADS * DIM, KV * DIM, KV * DIM))
        gate, up = gate_up.chunk(2)
        for module, weight in ((block.self_attn.q_proj, q), (block.self_attn.k_proj, k), (block.self_attn.v_proj, v), (block.self_attn.o_proj, out), (block.mlp.gate_proj, gate),
                               (block.mlp.up_proj, up), (block.mlp.down_proj, down), (block.input_layernorm, norm), (block.post_attention_layernorm, norm2)):
            put(module, weight)
    rotary = made.model.rotary_emb  # the only buffers; what is on "meta" has no values
    for name in ("inv_freq", "original_inv_freq"):
        if hasattr(rotary, name):
            setattr(rotary, name, frequencies.clone())
    model = made


def static_cache(batch):
    from transformers import StaticCache
    cache = StaticCache(config=model.config, max_cache_len=MAX)
    cache.early_initialization(batch, KV, DIM, dtype, torch.device(device))
    for part in cache.layers:
        part.keys.normal_()
        part.values.normal_()
    return cache


def rewind(cache):
    for part in cache.layers:
        part.cumulative_length.fill_(CONTEXT)


def transformers_decode(way, batches, run, capture):
    for batch in batches:
        tokens, cache = ids(batch, 1), static_cache(batch)
        rewind(cache)
        step = lambda: run(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
        row("decode", way, batch, CONTEXT + 1, timed(captured(step) if capture else step, lambda: rewind(cache)))
        del cache, step
        free()


def transformers_prefill(way):
    for count in PROMPTS:
        tokens = ids(1, count)
        row("prefill", way, 1, count, timed(lambda: model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)))


def transformers_compiled():
    torch._dynamo.reset()
    run = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for batch in (16, 1, 64) if options.shape == "8b" else BATCHES:
        transformers_decode("transformers-compile", (batch,), run, False)


def in_float32(step):
    """step(run_layer, caches) by the layer above in float32, each matrix cast when it is read: what a way's rounding is measured by."""
    global dtype, embed, head, ones
    kept = dtype, embed, head, ones
    dtype, embed, head, ones = torch.float32, embed.float(), head.float(), ones.float()
    try:
        return step(lambda x, cos, sin, keys, values, before, *weights: layer(x, cos, sin, keys, values, before, *(w.float() for w in weights)), caches_for(2, 24))
    finally:
        dtype, embed, head, ones = kept


def same_logits():
    """Prefill, then one token on the cache, by transformers and by the layer above. How far bf16 takes logits from float32 depends on
    depth and width (1.1e-2 after one layer of this width, 2.8e-2 after eight, on a CPU), and what two ways round apart is as much again: so the bound
    is not a number. Both must be about as far from float32 as the other: beside the one that rounds and else is the same code, another
    model would be many times as far."""
    tokens = ids(2, 17)
    prefill_and_next = lambda run_layer, caches: (forward(run_layer, tokens[:, :16], 0, caches), forward(run_layer, tokens[:, 16:], 16, caches))
    by_layer = prefill_and_next(layer, caches_for(2, 24))
    logits = model(input_ids=tokens, use_cache=False).logits
    by_transformers = logits[:, 15], logits[:, 16]
    off = lambda a, b: float((a.float() - b.float()).norm() / b.float().norm())
    if not cuda:  # all in float32
        apart = [off(a, b) for a, b in zip(by_layer, by_transformers)]
        print(f"relative L2 of both ways' logits: prefill {apart[0]:.1e}, decode {apart[1]:.1e}", file=sys.stderr, flush=True)
        if not max(apart) < 1e-4:
            raise RuntimeError("the ways do not compute the same model")
        return
    for what, a, b, exact in zip(("prefill", "decode"), by_layer, by_transformers, in_float32(prefill_and_next)):
        print(f"relative L2 of {what}: transformers from float32 {off(b, exact):.1e}, the layer from float32 {off(a, exact):.1e}, both apart {off(a, b):.1e}", file=sys.stderr, flush=True)
        if not 0.5 < off(b, exact) / off(a, exact) < 2:
            raise RuntimeError(f"the ways do not compute the same model in {what}")


def compiled():
    torch._dynamo.reset()
    own("compiled", torch.compile(layer, fullgraph=True, dynamic=False) if cuda else layer, BATCHES, PROMPTS)


def autotuned():
    torch._dynamo.reset()
    own("compiled-autotune", torch.compile(layer, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs") if cuda else layer, BATCHES, PROMPTS)


sync()
print(f"torch {torch.__version__}, weights made in {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
print("what,model,dtype,way,batch,context,us,tokens_per_s", flush=True)
done = attempt("compiled", 15, compiled)
there = attempt("transformers, made", 5, open_transformers) and attempt("logits", 3, same_logits)
if there:
    import transformers
    print(f"transformers {transformers.__version__}", file=sys.stderr, flush=True)
    if not attempt("transformers, decode", 8, lambda: transformers_decode("transformers", BATCHES, model, True)):
        attempt("transformers, decode without a graph", 5, lambda: transformers_decode("transformers-launched", BATCHES, model, False))
    attempt("transformers, prefill", 3, lambda: transformers_prefill("transformers"))
    attempt("transformers-compile", 20, transformers_compiled)
attempt("compiled-autotune", 20, autotuned)
sys.stdout.flush()
sys.exit(0 if done and there else 1)
