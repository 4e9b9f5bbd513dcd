import time
from tests.student import runs
def test_x(tmp_path, monkeypatch):
    t=time.time()
    runs.make(tmp_path); print("make", time.time()-t); t=time.time()
    runs.share_programs(monkeypatch); runs.use_devices(monkeypatch, 2)
    done, said = runs.run(runs.options(tmp_path)); print(said); print(done); print("first", time.time()-t); t=time.time()
    done, said = runs.run(runs.options(tmp_path, "b")); print("second", time.time()-t); t=time.time()
    runs.assert_equal(tmp_path/"b", tmp_path/"run")
    print("cmp", time.time()-t); t=time.time()
    done, said = runs.run(runs.options(tmp_path, "b")); print("third", time.time()-t, said)
    print(runs.raw_lines(tmp_path/"run/metrics.jsonl")[-1])
    print(runs.steps_saved(tmp_path/"run"))
    print(runs.words(runs.options(tmp_path)))
    import cProfile,pstats
    p=cProfile.Profile(); p.enable(); runs.run(runs.options(tmp_path, "c")); p.disable()
    pstats.Stats(p).sort_stats("cumtime").print_stats(45)
