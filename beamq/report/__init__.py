"""How results are written: tables, the console, report files, charts, model cards."""
